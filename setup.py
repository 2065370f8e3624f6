"""Metadata of the package. Reads the version as text: torch need not be installed yet."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

TEST = [
    "expecttest>=0.3",
    "hypothesis>=6.100",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "transformers>=4.50",
]
EXAMPLES = ["numpy>=1.26", "tqdm>=4.66"]
# A new minor version of these two judges old code anew, so they move on purpose only.
DEV = ["matplotlib>=3.8", "mypy>=2.4,<2.5", "ruff>=0.17,<0.18", "types-setuptools", "types-tqdm"]


def read_version() -> str:
    """The version in fusion_passes/version.py.

    Raises:
        ValueError: the file has no line ``__version__ = "..."``.
    """
    path = ROOT / "fusion_passes" / "version.py"
    match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f'{path} must have a line __version__ = "...", but has none. Add it.')
    return match.group(1)


setup(
    name="fusion_passes",
    version=read_version(),
    description="Fuses DistributedDataParallel's gradient all-reduces under torch.compile",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["fusion_passes", "fusion_passes.*"]),
    package_data={"fusion_passes": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.16"],
    extras_require={"test": TEST, "examples": EXAMPLES, "dev": [*TEST, *EXAMPLES, *DEV]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
