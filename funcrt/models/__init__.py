"""Model families: one file each, found by `model_type` as Hugging Face spells it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from funcrt.config import ModelConfig
from funcrt.errors import ConfigError
from funcrt.layers import NetworkFamily
from funcrt.models import (
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoe,
    lfm2,
    lfm2_moe,
    llama,
    mamba2,
    minicpm3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
    youtu,
)
from funcrt.models.family import Family


def _families(**modules: ModuleType) -> dict[str, NetworkFamily]:
    """A family for each `model_type`, of the file that describes it."""
    return {
        model_type: NetworkFamily(
            module.Config, module.network, module.__name__.rsplit(".", maxsplit=1)[-1]
        )
        for model_type, module in modules.items()
    }


FAMILIES = _families(
    cohere2=cohere2,
    cohere=cohere,
    deepseek_v2=deepseek_v2,
    deepseek_v3=deepseek_v3,
    dots1=dots1,
    ernie4_5=ernie4_5,
    ernie4_5_moe=ernie4_5_moe,
    exaone4=exaone4,
    gemma2=gemma2,
    gemma3_text=gemma3,
    gemma=gemma,
    glm4=glm4,
    glm4_moe=glm4_moe,
    glm4_moe_lite=glm4_moe_lite,
    glm=glm,
    gpt2=gpt2,
    gpt_neox=gpt_neox,
    gpt_oss=gpt_oss,
    granite=granite,
    granitemoe=granitemoe,
    lfm2=lfm2,
    lfm2_moe=lfm2_moe,
    llama=llama,
    mamba2=mamba2,
    minicpm3=minicpm3,
    mistral=mistral,
    mixtral=mixtral,
    olmo2=olmo2,
    olmo3=olmo3,
    phi3=phi3,
    qwen2=qwen2,
    qwen2_moe=qwen2_moe,
    qwen3=qwen3,
    qwen3_5=qwen3_5,
    qwen3_5_moe=qwen3_5_moe,
    qwen3_5_moe_text=qwen3_5_moe,
    qwen3_5_text=qwen3_5,
    qwen3_moe=qwen3_moe,
    qwen3_next=qwen3_next,
    smollm3=smollm3,
    stablelm=stablelm,
    starcoder2=starcoder2,
    youtu=youtu,
)


def family(model_type: str) -> Family:
    """The functions of a family, see `Family`.

    Raises ConfigError naming the supported types, and the way to others.
    """
    return _find(model_type)


def read_config(
    hf: Mapping[str, Any], dtype: str = "float32", ignore: Collection[str] = ()
) -> ModelConfig:
    """Read a Hugging Face `config.json` of any family.

    Args:
        hf: the parsed file.
        dtype: compute dtype.
        ignore: names of keys known not to matter for this checkpoint.

    Raises:
        ConfigError: an unsupported `model_type`; see also `ModelConfig.from_hf`.
    """
    model_type = hf.get("model_type")
    if model_type is None:
        raise ConfigError("config.json has no 'model_type'")
    return _find(model_type).config.from_hf(hf, dtype, ignore)


def is_own(family: Family) -> bool:
    """Whether a family is one of `FAMILIES`, not a module of another library."""
    return any(family is one for one in FAMILIES.values())


def _find(model_type: Any) -> NetworkFamily:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}; "
            "others go through mlx-lm's module: converters.load(folder, via='mlx_lm')"
        )
    return FAMILIES[model_type]
