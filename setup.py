"""Metadata of the package. Reads the version as text: torch need not be installed yet."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

TEST = [
    "accelerate>=1.1",  # This, lightning and transformers: for the examples with trainers.
    "expecttest>=0.3",
    "hypothesis>=6.100",
    "jsonschema>=4.20",
    "lightning>=2.5",
    "pydantic>=2",  # For the schema of the report.
    "pytest>=8,<9.2",  # pytest-xdist 3.8 cannot keep groups together in newer ones.
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "setuptools>=77",
    "transformers>=4.50",
]
EXAMPLES = ["numpy>=1.26", "tqdm>=4.66"]
# A new minor version of these two judges old code anew, so they move on purpose only.
DEV = ["mkdocs>=1.6,<2", "mypy>=2.4,<2.5", "ruff>=0.17,<0.18", "types-setuptools", "types-tqdm"]


def read_version() -> str:
    """The version in fusion_passes/config.py.

    Raises:
        ValueError: the file has no line ``__version__ = "..."``.
    """
    path = ROOT / "fusion_passes" / "config.py"
    match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f'{path} must have a line __version__ = "...", but has none. Add it.')
    return match.group(1)


def long_description() -> str:
    """README for a package index, which has no other files of the repository: a relative link
    becomes its text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^][]+)\]\((?![a-z]+:)[^)\s]+\)", r"\1", text)


setup(
    name="fusion_passes",
    version=read_version(),
    description="Fuses DistributedDataParallel's gradient all-reduces under torch.compile",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    keywords=[
        "all-reduce",
        "bucketing",
        "data parallel",
        "DDP",
        "distributed training",
        "PyTorch",
        "TorchInductor",
        "torch.compile",
    ],
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["fusion_passes", "fusion_passes.*"]),
    package_data={"fusion_passes": ["py.typed", "reporting/timeline.html"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.16"],
    extras_require={
        "test": TEST,
        "examples": EXAMPLES,
        "dev": [*TEST, *EXAMPLES, *DEV],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
