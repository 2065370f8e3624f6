"""Creates the environment that a command needs, then becomes that command.

    python3 tools/setup_env.py [--torch REQUIREMENT] -- COMMAND [ARGUMENT ...]

The environment is a folder in the checkout: ``.venv`` for the default torch, ``.venv-newest`` for
``--torch torch``, ``.venv-2.15.0`` for ``--torch torch==2.15.0``. It is made once; a change of
setup.py, of the Python, or of the checkout's place brings it up to date.

Runs on Python 3.6 and up, so that an old one says what is missing instead of failing to parse.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TORCH = "torch==2.13.0"
OLDEST_PYTHON = (3, 10)
STAMP = "fusion_passes.stamp"
IMPORTED = "import torch._dynamo.compiled_autograd, torch._inductor.compile_fx, torch.nn.parallel"


def main(arguments: "list[str]") -> int:
    """Set up and replace this process; return only if something is missing."""
    options = parse(arguments)
    problems = missing()
    if problems:
        for problem in problems:
            sys.stderr.write(f"setup: {problem}\n")
        return 1
    requirement = options.torch or default_torch()
    environment = ROOT / folder_name(requirement)
    try:
        ensure(environment, requirement)
    except subprocess.CalledProcessError as error:
        return failed(environment, error)
    become(environment, options.command)
    return 0


def parse(arguments: "list[str]") -> argparse.Namespace:
    """The options before ``--`` and the command after it."""
    parser = argparse.ArgumentParser(
        prog="setup_env.py", usage="%(prog)s [--torch REQUIREMENT] -- COMMAND [ARGUMENT ...]"
    )
    parser.add_argument(
        "--torch",
        type=torch_requirement,
        default="",
        help="torch, for the newest that setup.py allows, or torch==VERSION; by default "
        f"{DEFAULT_TORCH}, or the newest where an NVIDIA GPU is found",
    )
    parser.add_argument("command", nargs="+", help="what to run in the environment")
    return parser.parse_args(arguments)


def torch_requirement(text: str) -> str:
    """Accept what names an environment's folder without ambiguity."""
    if text and not re.fullmatch(r"torch(==[0-9][0-9A-Za-z.+]*)?", text):
        raise argparse.ArgumentTypeError(
            f"TORCH must be torch or torch==VERSION, but is {text!r}. Set one of these."
        )
    return text


def missing() -> "list[str]":
    """A sentence for each thing that this machine lacks."""
    problems = []
    if sys.version_info < OLDEST_PYTHON:
        problems.append(
            f"Python must be 3.10 or newer, but {sys.executable} is {platform.python_version()}. "
            "Choose another: make PYTHON=python3.11 ..."
        )
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        problems.append(
            f"torch.compile needs a C++ compiler, and there is no {compiler}. Install one (on "
            "Debian and Ubuntu: apt install g++), or name yours in the variable CXX."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        problems.append(
            f"torch.compile needs Python's headers, and there is no {header}. Install them (on "
            "Debian and Ubuntu: apt install python3-dev)."
        )
    return problems


def default_torch() -> str:
    """The requirement where none was named."""
    if shutil.which("nvidia-smi") is None:
        return DEFAULT_TORCH
    sys.stderr.write(
        "setup: found nvidia-smi, so this uses the newest torch, whose usual build has CUDA "
        f"({DEFAULT_TORCH} may come without). Set TORCH={DEFAULT_TORCH} to have that one.\n"
    )
    return "torch"


def folder_name(requirement: str) -> str:
    """Where the environment for this torch stands in the checkout."""
    if requirement == DEFAULT_TORCH:
        return ".venv"
    return ".venv-" + (requirement.partition("==")[2] or "newest")


def ensure(environment: Path, requirement: str) -> None:
    """Make the environment or bring it up to date; do nothing where it is already right.

    Raises:
        subprocess.CalledProcessError: venv or pip failed, and has said why.
    """
    stamp = environment / STAMP
    wanted = fingerprint(requirement)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    sys.stderr.write(
        f"setup: preparing {environment.name} with {requirement}. The first time downloads torch "
        "and takes minutes.\n"
    )
    if stamp.exists():
        stamp.unlink()
    subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(environment)])
    python = str(environment / "bin" / "python")
    # A fifth of the 12,600 files is ever imported: not to compile the others saves 20 s of a core.
    # One process imports them here: of several that start at once, each would compile all.
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += [requirement, "--editable", f"{ROOT}[dev]"]
    if not sys.stderr.isatty():
        command.append("--quiet")
    subprocess.check_call(command)
    # A torch that cannot be imported is for the user's command to say.
    subprocess.call([python, "-c", IMPORTED], stderr=subprocess.DEVNULL, env=keeping_bytecode())
    stamp.write_text(wanted)


def fingerprint(requirement: str) -> str:
    """A digest of everything that decides what the environment holds."""
    digest = hashlib.sha256()
    for text in (requirement, sys.version, sys.executable, str(ROOT)):
        digest.update(text.encode() + b"\0")
    digest.update((ROOT / "setup.py").read_bytes())
    return digest.hexdigest()


def failed(environment: Path, error: subprocess.CalledProcessError) -> int:
    """Say which step failed, and return the exit code."""
    step = "venv" if "venv" in error.cmd else "pip install"
    hint = " On Debian and Ubuntu: apt install python3-venv." if step == "venv" else ""
    sys.stderr.write(
        f"setup: {step} failed for {environment.name}; its own message stands above.{hint}\n"
    )
    return 1


def keeping_bytecode(**more: str) -> "dict[str, str]":
    """This process's variables and more, for one that keeps what it has compiled.

    Else each process compiles modules anew, which no user of an installed package does.
    """
    variables = dict(os.environ, **more)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def become(environment: Path, command: "list[str]") -> None:
    """Replace this process by the command, so that signals and exit code are the command's."""
    variables = keeping_bytecode(VIRTUAL_ENV=str(environment))
    variables.pop("PYTHONHOME", None)
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), variables.get("PATH", "")])
    sys.stdout.flush()
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
