"""Recurrent layers as pure functions: all tokens of a call at once, then the state after them.

Tokens are cut into blocks of at most 64. Within a block each token looks at each earlier one, as in
attention; between blocks only the state is carried. The graph's size hardly grows with T, where a
loop over tokens would unroll.

A row's padding comes after its tokens. The caller makes it inert with `cache.zero_padding`: a step
(or a learning rate and a log decay) of 0 multiplies the state by 1 and adds 0 to it, bit for bit.
What else padding holds does not matter as long as it is finite.

Shape key, besides that of `funcrt.ops`: C blocks, L tokens of a block, N state size, G groups of
heads that share something, R heads of a group.
"""

from __future__ import annotations

import math

import mlx.core as mx

# Measured on a CPU at T = 256 and 512: 32 to 128 take about as long. Shorter blocks make a larger
# graph of the delta rule, longer ones a larger matrix between tokens.
BLOCK = 64


def short_conv(window: mx.array, taps: mx.array, bias: mx.array | None = None) -> mx.array:
    """Causal convolution of each channel by itself, summed in float32.

    Args:
        window: `[B, k - 1 + T, C]`, from `cache.conv_window`: kept inputs, then new ones.
        taps: `[C, 1, k]` as checkpoints have them, the last one for the token itself.
        bias: `[C]`.

    Returns:
        `[B, T, C]` in the dtype of `window`; activation and gates are the caller's.
    """
    width = taps.shape[-1]
    tokens = window.shape[1] - width + 1
    taps = taps.reshape(-1, width).T.astype(mx.float32)  # [k,C]
    if tokens == 1:
        out = mx.sum(window * taps, axis=1, keepdims=True)
    else:
        out = sum(
            (window[:, i : i + tokens] * taps[i] for i in range(1, width)),
            start=window[:, :tokens] * taps[0],
        )
    if bias is not None:
        out = out + bias.astype(mx.float32)
    return out.astype(window.dtype)


def unit_norm(x: mx.array, eps: float = 1e-6) -> mx.array:
    """`x / sqrt(sum(x**2) + eps)` over the last axis; sums in float32, result in the dtype of x."""
    width = x.shape[-1]
    return mx.fast.rms_norm(x, None, eps / width) / math.sqrt(width)  # a mean for the sum


def ssd(
    x: mx.array, *, step: mx.array, decay: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The state space of Mamba-2 (arXiv:2405.21060, in blocks as in §6), computed in float32.

    For each token: `state = exp(step decay) state + step x b^T`, then `y = state c`.

    Args:
        x: `[B, T, H, D]`, any float dtype.
        step: `[B, T, H]`, at least 0; 0 at padding.
        decay: `[H]`, negative.
        b: `[B, T, G, N]`, what is written; heads `g H/G` to `(g + 1) H/G - 1` share group g.
        c: `[B, T, G, N]`, what is read.
        state: `[B, H, D, N]` before the call.

    Returns:
        y float32 `[B, T, H, D]` (without the skip of x), and the state after the call, float32.
    """
    x, step, decay, b, c, state = (a.astype(mx.float32) for a in (x, step, decay, b, c, state))
    fade = step * decay  # log
    u = x * step[..., None]
    if x.shape[1] == 1:
        return _ssd_step(u, fade, b, c, state)
    groups = b.shape[2]
    u, fade = _blocks(u, groups), _blocks(fade, groups)  # [B,G,R,C,L,D], [B,G,R,C,L]
    b, c = _blocks(b, groups), _blocks(c, groups)  # [B,G,1,C,L,N]
    kept = _kept(fade)
    added = (u * kept[..., -1, :, None]).swapaxes(-1, -2) @ b  # [B,G,R,C,D,N]
    states = _carry(added, mx.sum(fade, axis=-1), state)  # [B,G,R,C+1,D,N]
    y = (kept * (c @ b.swapaxes(-1, -2))) @ u
    before = states[:, :, :, :-1].swapaxes(-1, -2)
    y = y + mx.exp(mx.cumsum(fade, axis=-1))[..., None] * (c @ before)
    return _tokens(y, x.shape[1]), states[:, :, :, -1].reshape(state.shape)


def _ssd_step(
    u: mx.array, fade: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    b, c = (_per_head(a[:, 0], u.shape[2]) for a in (b, c))  # [B,H,N]
    state = mx.exp(fade[:, 0])[..., None, None] * state + u[:, 0, ..., None] * b[:, :, None]
    return mx.sum(state * c[:, :, None], axis=-1)[:, None], state


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, *, fade: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The gated delta rule (arXiv:2412.06464, in blocks as in §3.3), computed in float32.

    For each token: `state = exp(fade) state`, then `state = state + k (beta (v - k state))^T`, then
    `y = q state`.

    Args:
        q: `[B, T, K, D]`, scaled by the caller.
        k: `[B, T, K, D]`, of length 1 at most (`unit_norm`).
        v: `[B, T, H, N]`; heads `i H/K` to `(i + 1) H/K - 1` share key head i.
        fade: `[B, T, H]`, log of the decay, at most 0; 0 at padding.
        beta: `[B, T, H]`, learning rate from 0 to 2; 0 at padding.
        state: `[B, H, D, N]` before the call.

    Returns:
        y float32 `[B, T, H, N]`, and the state after the call, float32.
    """
    q, k, v, fade, beta, state = (a.astype(mx.float32) for a in (q, k, v, fade, beta, state))
    if q.shape[1] == 1:
        return _delta_step(q, k, v, fade, beta, state)
    groups = k.shape[2]
    tokens, shape = v.shape[1], state.shape
    q, k, v = (_blocks(a, groups) for a in (q, k, v))  # [B,K,1,C,L,D] twice, [B,K,R,C,L,N]
    fade, beta = _blocks(fade, groups), _blocks(beta, groups)[..., None]
    kept, since = _kept(fade), mx.exp(mx.cumsum(fade, axis=-1))[..., None]
    keys = k.swapaxes(-1, -2)  # [B,K,1,C,D,L]

    # What each token writes depends on what those before it in the block wrote: one triangular
    # system, solved for the values and for what the state before the block says of the keys.
    solved = _inverse(beta * kept * (k @ keys))  # [B,K,R,C,L,L]
    values, known = solved @ (beta * v), solved @ (beta * since * k)
    seen, asked = kept * (q @ keys), since * q
    stored = keys * kept[..., -1:, :]  # [B,K,R,C,D,L]
    left = since[..., -1:, :]  # [B,K,R,C,1,1]

    state = state.reshape(*v.shape[:3], *shape[2:])  # [B,K,R,D,N]
    rows = []
    for i in range(v.shape[3]):
        at = (slice(None), slice(None), slice(None), i)
        written = values[at] - known[at] @ state  # [B,K,R,L,N]
        rows.append(asked[at] @ state + seen[at] @ written)
        state = left[at] * state + stored[at] @ written
    return _tokens(mx.stack(rows, axis=3), tokens), state.reshape(shape)


def _delta_step(
    q: mx.array, k: mx.array, v: mx.array, fade: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    q, k = (_per_head(a[:, 0], v.shape[2])[..., None] for a in (q, k))  # [B,H,D,1]
    state = mx.exp(fade[:, 0])[..., None, None] * state
    written = beta[:, 0, :, None] * (v[:, 0] - mx.sum(state * k, axis=-2))  # [B,H,N]
    state = state + k * written[:, :, None]
    return mx.sum(state * q, axis=-2)[:, None], state


# --- blocks -------------------------------------------------------------------------------------


def _blocks(x: mx.array, groups: int) -> mx.array:
    """`[B, T, H, ...]` -> `[B, G, R, C, L, ...]`, with zeros after the last token."""
    batch, tokens, heads, *rest = x.shape
    length = min(tokens, BLOCK)
    missing = -tokens % length
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, -1, length, groups, heads // groups, *rest)
    return x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim))


def _tokens(x: mx.array, tokens: int) -> mx.array:
    """`[B, G, R, C, L, D]` -> `[B, T, H, D]`."""
    batch, groups, heads, blocks, length, width = x.shape
    x = x.transpose(0, 3, 4, 1, 2, 5)  # [B,C,L,G,R,D]
    return x.reshape(batch, blocks * length, groups * heads, width)[:, :tokens]


def _per_head(x: mx.array, heads: int) -> mx.array:
    """`[B, G, N]` -> `[B, H, N]`."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)


def _kept(fade: mx.array) -> mx.array:
    """`[..., L]` log decays -> `[..., L, L]`: what is left at token i of what token j wrote.

    Each entry is its own sum. The difference of two sums from the start would lose, after one
    token that forgets nearly all, the digits of the slow decay that follows it.
    """
    order = mx.arange(fade.shape[-1])
    later = order[:, None] > order
    total = mx.cumsum(mx.where(later, fade[..., None], 0), axis=-2)
    return mx.exp(mx.where(order[:, None] >= order, total, -mx.inf))


def _carry(added: mx.array, fade: mx.array, state: mx.array) -> mx.array:
    """States before each block and after the last, `[B, G, R, C + 1, D, N]`.

    Args:
        added: `[B, G, R, C, D, N]`, what each block leaves at its end.
        fade: `[B, G, R, C]`, log decay of a whole block.
        state: `[B, H, D, N]`, before the first.
    """
    *lead, blocks, width, size = added.shape
    parts = mx.concatenate([state.reshape(*lead, 1, width, size), added], axis=-3)
    kept = _kept(mx.pad(fade, [(0, 0)] * len(lead) + [(1, 0)]))  # [B,G,R,C+1,C+1]
    states = kept @ parts.reshape(*lead, blocks + 1, -1)
    return states.reshape(parts.shape)


def _inverse(lower: mx.array) -> mx.array:
    """Inverse of a unit lower triangular matrix `[..., L, L]` of which only what is below counts.

    Halves of halves: from the inverses of two neighbouring diagonal blocks A and C, with B below A,
    that of both has `-C^-1 B A^-1` in place of B. Every intermediate is an inverse of a part, which
    the delta rule bounds; the shorter product of `I - N`, `I + N^2`, `I + N^4`, ... is not bounded
    by it, and loses all digits on parallel keys.
    """
    order = mx.arange(lower.shape[-1], dtype=mx.int32)
    apart = mx.where(order[:, None] > order, mx.bitwise_xor(order[:, None], order), 0)
    inverse = mx.eye(lower.shape[-1])
    size = 1
    while size < lower.shape[-1]:
        between = mx.where((apart >= size) & (apart < 2 * size), lower, 0)
        inverse = inverse - (between if size == 1 else inverse @ between @ inverse)
        size *= 2
    return inverse
