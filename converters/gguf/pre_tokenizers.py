"""What the names in `tokenizer.ggml.pre` stand for: the rules of the models' tokenizer.json files.

Names and patterns are those that llama.cpp knows (src/llama-vocab.cpp), of generating models. Each
pattern cuts what the ones before left; what it does not match stays in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_REST = rf"{_SYMBOLS}|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_WORDS = (
    rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
# Letters with case, but for scripts that were left out.
_WITH_CASE = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{1df1e}]]"
)
_OLD_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cased(after: str, without: str = "") -> str:
    """Words split where lower case turns into upper case, each followed by `after`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    return f"{start}{upper}*{lower}+{after}|{start}{upper}+{lower}*{after}"


_NOT_HAN = _cased(_CONTRACTION + "?", without=r"&&[^\p{Han}]")
_GPT4O = rf"{_cased(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """What a `tokenizer.ggml.pre` name stands for.

    Attributes:
        patterns: regexes of the pieces, one after another.
        ignore_merges: a piece that is a token becomes it, whatever the merges give.
        add_bos: what a missing `tokenizer.ggml.add_bos_token` means.
        nfc: normalize to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object."""
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, bytes_])


def _named(pre: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, pre)


_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named(
        PreTokenizer((_GPT2,)),
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat",
        "exaone4", "a.x-4.0", "mellum",
    ),
    **_named(
        _DIGITS, "smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"
    ),
    "command-r": replace(_DIGITS, nfc=True),
    **_named(
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    **_named(PreTokenizer((_LLAMA3,)), "dbrx", "smaug-bpe", "chatglm-bpe"),
    **_named(PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4", "glm5"),
    **_named(PreTokenizer((_QWEN2,), nfc=True), "qwen2", "deepseek-r1-qwen"),
    **_named(
        PreTokenizer((_QWEN2,)),
        "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "megrez",
    ),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **_named(PreTokenizer((_GPT4O,)), "gpt-4o", "llama4", "kanana2", "minimax-m2"),
    "tekken": PreTokenizer(
        (rf"{_cased('')}|\p{{N}}|{_PATHS}|{_SPACES}",), ignore_merges=True, add_bos=True
    ),
    **_named(
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya", "cohere2moe"
    ),
    "kimi-k2": PreTokenizer((
        rf"\p{{Han}}+|{_NOT_HAN}|\p{{N}}{{1,3}}|{_REST}",
    )),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?{_WITH_CASE}+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _OLD_CJK,
        r"\p{N}+",
    )),
    "deepseek-coder": PreTokenizer((
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}",
    )),
    **_named(
        PreTokenizer(_DEEPSEEK3), "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"
    ),
    "spark2_5": PreTokenizer((
        *_DEEPSEEK3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}",
    )),
    "youtu": PreTokenizer((
        r"[\uac00-\ud7a3\u3131-\u318e]+|[\u3105-\u312f]+|[\uff01\u2026\u201c\u201d\u2018\u2019"
        r"\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|" + _CJK,
        rf"{_cased(_CONTRACTION + '?')}|\p{{N}}|{_PATHS}|{_SPACES}",
    ), ignore_merges=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **_named(PreTokenizer((_CASELESS,)), "poro-chat", "bloom", "gpt3-finnish"),
    "viking": PreTokenizer((_CASELESS, r"\p{N}")),
    **_named(
        PreTokenizer((
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        )),
        "bailingmoe", "bailingmoe2", "llada-moe",
    ),
    "seed-coder": PreTokenizer((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": PreTokenizer((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_REST}"), ignore_merges=True
    ),
    "exaone-moe": PreTokenizer((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    "jais-2": PreTokenizer((
        rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|"
        + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"\s{1,2}(?!\S)|\s",
    )),
}  # fmt: skip
