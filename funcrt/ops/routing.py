"""Rules of routing: which experts a token goes to, and how much each of them counts.

A rule takes the router's scores and gives, for each token, k experts, the best first, and their
weights. It works on each token by itself, in float32; of equal scores the lower expert comes first.

Shape key, besides that of `funcrt.ops`: X experts, k of them for each token.
"""

from __future__ import annotations

from funcrt.errors import ConfigError

import mlx.core as mx

Route = tuple[mx.array, mx.array]


def route_softmax(scores: mx.array, count: int, *, normalize: bool, scale: float = 1.0) -> Route:
    """Softmax over all experts, then the best (Mixtral, arXiv:2401.04088; Qwen3-MoE, DeepSeek-V2).

    Args:
        scores: the router's logits `[..., X]`.
        count: k.
        normalize: whether the k weights shall add up to 1.
        scale: what weights are multiplied by in the end.

    Returns:
        chosen `[..., k]` and weights float32 `[..., k]`.
    """
    weights = mx.softmax(scores.astype(mx.float32), axis=-1)
    return _weigh(weights, _best(weights, count), scale, 0.0 if normalize else None)


def route_top_softmax(scores: mx.array, count: int) -> Route:
    """The best, then softmax over them alone (gpt-oss); arguments as in `route_softmax`."""
    scores = scores.astype(mx.float32)
    chosen = _best(scores, count)
    return chosen, mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)


def route_grouped_softmax(
    scores: mx.array, count: int, *, groups: int, kept: int, scale: float
) -> Route:
    """Softmax, then the best within the groups with the best expert (arXiv:2405.04434 §2.2).

    Args:
        scores: the router's logits `[..., X]`.
        count: k.
        groups: how many groups of X / groups neighbours there are.
        kept: how many of them may be chosen from.
        scale: what weights are multiplied by in the end.

    Returns:
        chosen `[..., k]` and weights float32 `[..., k]`.

    Raises:
        ConfigError: groups that do not divide the experts, or keep too few of them.
    """
    weights = mx.softmax(scores.astype(mx.float32), axis=-1)
    among = _keep_groups(weights, count, groups, kept, best=1)
    return _weigh(weights, _best(among, count), scale, None)


def route_sigmoid(
    scores: mx.array,
    count: int,
    *,
    bias: mx.array,
    groups: int,
    kept: int,
    normalize: bool,
    scale: float,
    eps: float = 1e-20,
) -> Route:
    """Sigmoids that a bias corrects, for the choice only (DeepSeek-V3, arXiv:2412.19437 §2.1.2).

    A group counts as much as the two best of its experts.

    Args:
        scores: the router's logits `[..., X]`.
        count: k.
        bias: `[X]`.
        groups: how many groups of X / groups neighbours there are.
        kept: how many of them may be chosen from.
        normalize: whether the k weights shall add up to 1 before they are scaled.
        scale: what weights are multiplied by in the end.
        eps: added to that sum.

    Returns:
        chosen `[..., k]` and weights float32 `[..., k]`.

    Raises:
        ConfigError: groups that do not divide the experts, or keep too few of them.
    """
    weights = mx.sigmoid(scores.astype(mx.float32))
    among = _keep_groups(weights + bias.astype(mx.float32), count, groups, kept, best=2)
    return _weigh(weights, _best(among, count), scale, eps if normalize else None)


def route_corrected_softmax(scores: mx.array, count: int, *, bias: mx.array, least: float) -> Route:
    """Softmax over all experts that a bias corrects, for the choice only (ERNIE 4.5).

    Args:
        scores: the router's logits `[..., X]`.
        count: k.
        bias: `[X]` or `[1, X]`.
        least: the k weights are divided by their sum, or by this if it is more.

    Returns:
        chosen `[..., k]` and weights float32 `[..., k]`.
    """
    weights = mx.softmax(scores.astype(mx.float32), axis=-1)
    chosen = _best(weights + bias.astype(mx.float32), count)
    weights = mx.take_along_axis(weights, chosen, axis=-1)
    return chosen, weights / mx.maximum(mx.sum(weights, axis=-1, keepdims=True), least)


def check_groups(experts: int, count: int, groups: int, kept: int, best: int) -> None:
    """Raise ConfigError unless `count` experts can be chosen within the `kept` best groups.

    Args:
        experts: X.
        count: k.
        groups: how many groups of X / groups neighbours there are.
        kept: how many of them may be chosen from.
        best: how many experts of a group its own score is made of.
    """
    size, left = divmod(experts, groups)
    if left or not best <= size or not count <= kept * size or kept > groups:
        raise ConfigError(
            f"routing: {count} of {experts} experts in {kept} of {groups} groups is not "
            f"possible; groups must divide the experts, hold at least {best} each, and those kept "
            "must hold all that are chosen"
        )


def _best(scores: mx.array, count: int) -> mx.array:
    # Not argpartition: it leaves the order of the k, and of ties, to chance.
    return mx.argsort(mx.stop_gradient(-scores), axis=-1)[..., :count]


def _weigh(weights: mx.array, chosen: mx.array, scale: float, eps: float | None) -> Route:
    weights = mx.take_along_axis(weights, chosen, axis=-1)
    if eps is not None:
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + eps)
    return chosen, weights if scale == 1 else weights * scale


def _keep_groups(scores: mx.array, count: int, groups: int, kept: int, best: int) -> mx.array:
    """`scores [..., X]` with -inf outside of the `kept` groups whose `best` add up to most."""
    check_groups(scores.shape[-1], count, groups, kept, best)
    if kept == groups:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    top = mx.sum(mx.topk(grouped, best, axis=-1), axis=-1)  # [...,groups]
    rank = mx.argsort(mx.argsort(mx.stop_gradient(-top), axis=-1), axis=-1)
    return mx.where((rank < kept)[..., None], grouped, -mx.inf).reshape(scores.shape)
