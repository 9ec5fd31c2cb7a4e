"""From the ``[model]`` table and an optional checkpoint to the model's configuration."""

from __future__ import annotations

from dataclasses import fields

from harts_core.errors import ConfigError
from harts_core.exec.config import ModelSection
from harts_core.exec.config_table import suggest
from harts_core.exec.model.config import ALIASES, PRESETS, ModelConfig

NOT_COMPUTED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "num_nextn_predict_layers",
)
"""Keys of config.json that a table may set although they do not touch the computation."""

COMPUTED = tuple(f.name for f in fields(ModelConfig) if f.name not in ("extra", "initializer_range"))
"""Keys in which a checkpoint and the table must agree."""


def resolve_model_config(
    section: ModelSection, checkpoint: ModelConfig | None = None, where: str = "train config"
) -> ModelConfig:
    """The model to build.

    Args:
        section: the ``[model]`` table.
        checkpoint: the configuration of the weights to load, if there are any; it decides, and the keys of
            the table must agree with it.
        where: named in errors.

    Raises:
        ConfigError: an unknown preset or key, a missing or wrong value, or a key that contradicts the
            checkpoint.
    """
    if section.preset is not None and section.preset not in PRESETS:
        raise ConfigError(
            f"[model] unknown preset {section.preset}",
            where=where,
            hint=suggest(section.preset, PRESETS, "presets"),
        )
    known = [*COMPUTED, "initializer_range", *ALIASES, *NOT_COMPUTED]
    for key in section.overrides:
        if key not in known:
            raise ConfigError(f"[model] unknown key {key}", where=where, hint=suggest(key, known, "keys"))
    overrides = {ALIASES.get(key, key): value for key, value in section.overrides.items()}
    base = PRESETS[section.preset].to_dict() if section.preset is not None else {}
    if checkpoint is None:
        if not base and not overrides:
            raise ConfigError(
                "no model is named: [model] is empty and there is no checkpoint",
                where=where,
                hint='set [model] preset = "cpu-moe"; harts train and logprob also take --checkpoint DIR',
            )
        try:
            return ModelConfig.from_dict({**base, **overrides})
        except ConfigError as error:
            raise ConfigError(error.what, where=f"{where}, [model]", hint=error.hint) from None
    loaded = checkpoint.to_dict()
    for key, value in {**base, **overrides}.items():
        if key in COMPUTED and loaded[key] != value:
            raise ConfigError(
                f"[model] {key} = {value!r} contradicts the checkpoint, which has {loaded[key]!r}",
                where=where,
                hint="leave [model] empty to use the checkpoint's configuration",
            )
    return checkpoint
