"""The wheel: what it holds, and that the README's loop runs from it with the core alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOOP = """
import sys
for name in ("rich", "typer", "matplotlib", "sklearn", "optuna", "pytest"):
    sys.modules[name] = None  # as where they are not installed
import torch
import torch.nn.functional as F

data = torch.utils.data.TensorDataset(torch.rand(64, 1, 28, 28), torch.randint(10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "src", "pyproject.toml", "README.md", "LICENSE", "experiments"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in listed:
        if (ROOT / name).exists():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, "."]
    done = subprocess.run(command, cwd=folder / "copy", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_it_holds_the_library_and_the_app_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    assert packages == {"dpkfc", *(name for name in packages if name.endswith(".dist-info"))}
    assert {"dpkfc/py.typed", "dpkfc/app/reports/page.css", "dpkfc/engine/step.py"} <= set(names)


def test_the_readme_loop_runs_from_it_with_the_core_dependencies_alone(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    block = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    kept = [line[1:] for line in block[1].splitlines() if not line.startswith("-")]
    code = LOOP + "\n".join(kept).replace("1e-5", "1e-3")
    code += f"\nassert dpkfc.__file__.startswith({str(tmp_path)!r}), dpkfc.__file__\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Privacy plan" in done.stdout


@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_without_the_extra_the_command_says_how_to_install_it(missing: str) -> None:
    """`find_spec` sees no package that a finder hides."""
    code = f"""
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)
from dpkfc.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'dpkfc[cli]'")
