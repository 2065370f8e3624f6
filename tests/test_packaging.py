"""The wheel and the sdist: built from a clean copy, installed outside of the checkout, and checked
there. Nothing here needs a network."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import venv
from pathlib import Path
from typing import Final

import pytest

import fusion_passes
from tests.support.launch import ROOT, launch, tracked

pytest.importorskip("setuptools", minversion="77", reason="older ones do not read license_files")

VERSION: Final = fusion_passes.__version__
PACKAGE: Final = ROOT / "fusion_passes"
BUILD: Final = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def run(*command: str, cwd: Path, path: str = "") -> list[str]:
    """The lines that Python prints in a process that cannot import the checkout."""
    return launch(*command, cwd=cwd, PYTHONPATH=path, MYPYPATH="").stdout.splitlines()


def build(kind: str, source: Path, output: Path) -> Path:
    return output / run("-c", BUILD, f"build_{kind}", str(output), cwd=source)[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist."""
    copy, output = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    found = {"wheel": build("wheel", copy, output)}
    shutil.rmtree(copy / "build")
    return found | {"sdist": build("sdist", copy, output)}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of an environment that contains only the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (target,) = environment.glob("lib/python*/site-packages")
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    pip += ["--no-compile", "--quiet", "--target", str(target)]
    run(*pip, str(built["wheel"]), cwd=environment)
    return target


@pytest.fixture(scope="module")
def distribution(installed: Path) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_all_of_the_package_is_installed_and_nothing_else(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    assert names == {"fusion_passes", f"fusion_passes-{VERSION}.dist-info"}
    assert files_of(installed / "fusion_passes") == files_of(PACKAGE)


def test_the_sdist_makes_the_same_wheel_and_has_nothing_else(
    built: dict[str, Path], tmp_path: Path
) -> None:
    shutil.unpack_archive(built["sdist"], tmp_path / "sdist")
    (source,) = (tmp_path / "sdist").iterdir()
    names = {path.name for path in source.iterdir()}
    assert names - {"PKG-INFO", "setup.cfg", "fusion_passes.egg-info"} == {
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "fusion_passes",
        "pyproject.toml",
        "setup.py",
    }
    for name, wheel in (("one", built["wheel"]), ("other", build("wheel", source, tmp_path))):
        shutil.unpack_archive(wheel, tmp_path / name, "zip")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")


def test_what_a_user_gets_beside_the_package(distribution: importlib.metadata.Distribution) -> None:
    """Only torch and the license."""
    (torch,) = (line for line in distribution.requires or [] if "extra ==" not in line)
    assert torch.startswith("torch<")
    licenses = [path for path in distribution.files or [] if path.name == "LICENSE"]
    assert [path.read_text() for path in licenses] == [(ROOT / "LICENSE").read_text()]


def test_the_description_has_no_relative_link(
    distribution: importlib.metadata.Distribution,
) -> None:
    readme = (ROOT / "README.md").read_text()
    text = str(distribution.metadata.get_payload())  # type: ignore[attr-defined]
    links = LINK.findall(readme)
    assert links
    assert LINK.findall(text) == [link for link in links if link.startswith("https:")]
    without_links = [re.sub(r"\[([^][]+)\]\([^)\s]+\)", r"\1", item) for item in (readme, text)]
    assert without_links[0] == without_links[1]
    assert "![" not in text, "a package index would not find the picture"


def test_the_metadata_has_no_placeholder(distribution: importlib.metadata.Distribution) -> None:
    newest = re.search(r"^## \[(.+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
    assert ".example" not in str(distribution.metadata)


PROGRAM: Final = """
import importlib.metadata
import pkgutil

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusion_passes

for room in pkgutil.walk_packages(fusion_passes.__path__, "fusion_passes."):
    __import__(room.name)
torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
torch._inductor.config.ddp_fusion = "concat"
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
compiled = torch.compile(ddp)
for _ in range(2):
    compiled(torch.ones(2, 4)).sum().backward()
(module,) = fusion_passes.report().modules
versions = fusion_passes.__version__, importlib.metadata.version("fusion_passes")
print(fusion_passes.__file__, *versions, module.stored, len(module.buckets))
"""


def test_the_installed_package_fuses(installed: Path, tmp_path: Path) -> None:
    said = run("-c", PROGRAM, cwd=tmp_path, path=str(installed))
    file = installed / "fusion_passes" / "__init__.py"
    assert said[-1].split() == [str(file), VERSION, VERSION, "2", "1"]


def test_mypy_sees_the_types(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text(
        "import fusion_passes\n"
        'reveal_type(fusion_passes.FusionConfig(mode="concat").bucket_cap_mb)\n'
        "reveal_type(fusion_passes.reports()[0].buckets)\n"
    )
    python = installed.parents[2] / "bin" / "python"
    mypy = ["-m", "mypy", "--strict", "--python-executable", str(python)]
    said = run(*mypy, "user.py", cwd=tmp_path)
    assert "float | None" in said[0]
    assert "BucketReport" in said[1]
