"""The wheel and the sdist: built from a clean copy, installed away from the checkout, and checked
there. Nothing here needs a network."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("setuptools", minversion="77", reason="older ones do not read license_files")

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "fusion_passes"
BUILD: Final = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Standard output of a command that sees nothing of the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    result = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist of the files that git tracks or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    copy, output = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in run(*listed, cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    found = {}
    for kind in ("wheel", "sdist"):
        said = run(sys.executable, "-c", BUILD, f"build_{kind}", str(output), cwd=copy)
        found[kind] = output / said.splitlines()[-1]
        shutil.rmtree(copy / "build", ignore_errors=True)
    return found


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each was installed: the site-packages of an environment that has nothing else."""
    targets = {}
    for kind, archive in built.items():
        environment = tmp_path_factory.mktemp(kind)
        venv.create(environment, symlinks=True)
        (targets[kind],) = environment.glob("lib/python*/site-packages")
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
        run(*pip, "--target", str(targets[kind]), str(archive), cwd=environment)
    return targets


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


kinds = pytest.mark.parametrize("kind", ["wheel", "sdist"])


@kinds
def test_all_of_the_package_is_installed_and_nothing_else(
    installed: dict[str, Path], kind: str
) -> None:
    names = {path.name for path in installed[kind].iterdir()}
    assert names == {"fusion_passes", f"fusion_passes-{version()}.dist-info"}
    assert files_of(installed[kind] / "fusion_passes") == files_of(PACKAGE)
    for name in ("py.typed", "reporting/timeline.html"):
        assert (installed[kind] / "fusion_passes" / name).is_file()


def version() -> str:
    text = (PACKAGE / "version.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None
    return match[1]


def test_the_archives_have_nothing_of_tests_tools_and_docs(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert {name.split("/")[0] for name in wheel.namelist()} == {
            "fusion_passes",
            f"fusion_passes-{version()}.dist-info",
        }
    with tarfile.open(built["sdist"]) as sdist:
        names = {"/".join(name.split("/")[1:2]) for name in sdist.getnames()} - {""}
    assert names - {"PKG-INFO", "setup.cfg", "fusion_passes.egg-info"} == {
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "fusion_passes",
        "pyproject.toml",
        "setup.py",
    }


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def distribution(
    installed: dict[str, Path], request: pytest.FixtureRequest
) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(path=[str(installed[request.param])])
    return found


def test_metadata(distribution: importlib.metadata.Distribution) -> None:
    metadata = distribution.metadata
    assert (metadata["Name"], metadata["Version"]) == ("fusion_passes", version())
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License"] == "BSD-3-Clause"
    for classifier in ("Python :: 3.10", "Python :: 3.14", "Typing :: Typed"):
        assert any(one.endswith(classifier) for one in metadata.get_all("Classifier", []))
    assert "torch.compile" in metadata["Keywords"]
    requires = distribution.requires or []
    assert [line for line in requires if "extra ==" not in line] == ["torch<2.16,>=2.11"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"test", "examples", "dev"}
    licenses = [path for path in distribution.files or [] if path.name == "LICENSE"]
    assert [path.read_text() for path in licenses] == [(ROOT / "LICENSE").read_text()]


def project_links(metadata: importlib.metadata.PackageMetadata) -> dict[str, str]:
    rows = (row.split(", ", 1) for row in metadata.get_all("Project-URL", []))
    return {row[0]: row[1] for row in rows}


def test_links_of_the_description_lead_into_the_repository(
    distribution: importlib.metadata.Distribution,
) -> None:
    metadata = distribution.metadata
    links = project_links(metadata)
    assert links.keys() == {"Homepage", "Documentation", "Issues", "Changelog"}
    text = str(metadata.get_payload())  # type: ignore[attr-defined]
    written = LINK.findall((ROOT / "README.md").read_text())
    found = LINK.findall(text)
    assert len(found) == len(written) > 10
    at_tag = f"{links['Homepage']}/blob/v{version()}/"
    for before, after in zip(written, found, strict=True):
        assert after == (before if before.startswith("https:") else at_tag + before)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](URL/blob/v1.2/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](URL/raw/v1.2/docs/a.png)"),
        ("[![a](a.png)](a.md)", "[![a](URL/raw/v1.2/a.png)](URL/blob/v1.2/a.md)"),
        ("[a](https://a.example/b)", "[a](https://a.example/b)"),
        ("[a](#a)", "[a](#a)"),
    ],
)
def test_links_and_pictures_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: str
) -> None:
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    names: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    exec((ROOT / "setup.py").read_text(), names)
    (tmp_path / "README.md").write_text(text)
    names |= {"ROOT": tmp_path, "REPOSITORY": "URL"}
    assert names["long_description"]("1.2") == expected  # type: ignore[operator]


def test_a_release_has_an_address(distribution: importlib.metadata.Distribution) -> None:
    newest = re.search(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version()
    if newest[2] != "unreleased":
        assert ".example" not in project_links(distribution.metadata)["Homepage"], "see setup.py"


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


def test_the_installed_package_fuses(installed: dict[str, Path], tmp_path: Path) -> None:
    # What the sdist installs is the same, byte by byte: see the first test.
    said = run(sys.executable, "-c", PROGRAM, cwd=tmp_path, PYTHONPATH=str(installed["wheel"]))
    file = installed["wheel"] / "fusion_passes" / "__init__.py"
    assert said.splitlines()[-1].split() == [str(file), version(), version(), "2", "1"]


def test_mypy_sees_the_types(installed: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text(
        "import fusion_passes\n"
        'reveal_type(fusion_passes.FusionConfig(mode="concat").bucket_cap_mb)\n'
        "reveal_type(fusion_passes.reports()[0].buckets)\n"
    )
    python = installed["wheel"].parents[2] / "bin" / "python"
    said = run(
        sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py",
        cwd=tmp_path,
    )  # fmt: skip
    assert "float | None" in said
    assert "BucketReport" in said
