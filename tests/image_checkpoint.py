"""A tiny checkpoint that reads images: random weights, their control tokens, and a template for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.model.config import ModelConfig
from dgemma.model.vision_config import VisionConfig

VISION = VisionConfig(
    hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, patch_size=4,
    pooling=3, num_positions=256, rope_theta=100.0, norm_eps=1e-6, clips=False, standardizes=True,
    image_token=60, begin_token=61, end_token=62,
)  # fmt: skip
CONFIG: ModelConfig = replace(PRESETS["tiny"].config, vision=VISION, sees_whole_images=True)
_CONTROLS = {"<unused60>": "<|image|>", "<unused61>": "<|image>", "<unused62>": "<image|>"}
# As the released templates do: content is a text, or a list of parts.
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type == 'image' -%}{{- '<|image|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def write_tokenizer(path: Path, template: str = TEMPLATE) -> None:
    """The small tokenizer, in which three unused controls are those of images."""
    path.mkdir(parents=True, exist_ok=True)
    with resources.as_file(resources.files("dgemma") / "data" / "tokenizer") as files:
        for file in Path(files).iterdir():
            shutil.copy(file, path)
    text = (path / "tokenizer.json").read_text()
    for unused, name in _CONTROLS.items():
        assert text.count(json.dumps(unused)) > 0
        text = text.replace(json.dumps(unused), json.dumps(name))
    (path / "tokenizer.json").write_text(text)
    (path / "chat_template.jinja").write_text(template)


def write_image_checkpoint(path: Path, *, config: ModelConfig = CONFIG, seed: int = 0) -> Path:
    write_tokenizer(path / "tokenizer")
    write_random(
        path / "model", config, dtype="F32", seed=seed, companions=sorted((path / "tokenizer").iterdir())
    )
    return path / "model"
