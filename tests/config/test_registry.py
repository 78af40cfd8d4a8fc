"""Names in a config: built in, module:name, or path/to/file.py:name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_rl.config.registry import check_name, resolve
from megatron_rl.errors import UserError

BUILTIN = {"mean": min, "median": max}


def check(name: str):
    return resolve("score", name, BUILTIN, "data.score")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\nnumber = 3\n\n\n@dataclasses.dataclass\nclass Score:\n    x: int = 1\n")
    return path


def test_three_kinds_of_names(file):
    assert check("mean") is min
    assert check("os.path:join") is __import__("os").path.join
    assert check(f"{file}:Score")().x == 1
    assert check(f"{file}:Score") is check(f"{file}:Score"), "a file is imported once"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maen", r"config: data.score: there is no score 'maen'; did you mean 'mean'\?"),
        ("xyz", "there is no score 'xyz'; available: mean, median"),
        ("no_such_module:f", "no_such_module:f: there is no module 'no_such_module'"),
        ("os.no_such:f", "there is no module 'os.no_such'"),
        ("nowhere/mine.py:f", "there is no file nowhere/mine.py"),
        ("os.path:jion", "os.path has no 'jion'; did you mean 'join'"),
        ("os.path:", "there is no score 'os.path:'"),
        (":f", "there is no score ':f'"),
        ("os:sep", "os:sep is '/', not a score: it cannot be called"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(name, message):
    with pytest.raises(UserError, match=message) as error:
        check(name)
    assert "data.score" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine.py:2\)"),
        ("def f(:\n", r"cannot be imported: SyntaxError: .*mine.py:1\)"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_file_that_fails_names_its_line(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(code)
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            check(f"{tmp_path / 'mine.py'}:f")


def test_checking_a_name_imports_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    check_name("score", f"{tmp_path / 'mine.py'}:f", BUILTIN, "data.score")
    with pytest.raises(UserError, match="SystemExit: imported"):
        check(f"{tmp_path / 'mine.py'}:f")


def test_the_working_directory_is_a_place_of_modules(tmp_path):
    (tmp_path / "my_scores.py").write_text("def f():\n    return 5\n")
    program = (
        "from megatron_rl.config.registry import resolve; print(resolve('score', 'my_scores:f', {}, 'data.score')())"
    )
    path = ":".join(p for p in sys.path if p)
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": path}
    )
    assert found.stdout == "5\n", found.stderr
