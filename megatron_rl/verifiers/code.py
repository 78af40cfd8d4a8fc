"""Verifier `code`: runs tests, in the formats of HumanEval, MBPP and APPS, on programs that a model wrote.

The program runs in one container and the tests in another. They exchange only plain values. A program can therefore neither
read the expected results nor claim that it has passed.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.verifiers.stated_answer import behind_thinking

_PYTHON = re.compile(r"(?:(?:lang(?:uage)?-)?[ic]?py(?:thon)?[-\d.]*|[\w./-]+\.py)?", re.IGNORECASE)
_BLOCKS = MarkdownIt("zero").enable(["fence", "code", "list", "blockquote"])
"""Markdown parser that finds only blocks. It does not parse the text within lines."""
_LOOSE = re.compile(r"(?<!`)(```+)[^\n`]*\n(.*?)(?:\1|\Z)|(?<!~)(~~~+)[^\n~]*\n(.*?)(?:\3|\Z)", re.DOTALL)
"""Code blocks whose fences start or end within a line, for example next to a tag."""
_BEGINS = re.compile(r"from [\w.]+ import |import \w|(?:async )?def \w+\(|class \w|@\w")
MOST_BLOCKS = 32
"""Largest number of code blocks of a response that are tried, counted from the end."""
MOST_DEPTH = 3
"""Largest depth of code blocks within code blocks, for example in a whole document within a fence."""
MEMORY_MB = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tests:
    """Tests of a program: Python source, or inputs with expected outputs."""

    source: str | None = None
    entry: str | None = None
    """Name of the program's function that is passed to `check(candidate)` in the source."""
    names: list[str] = field(default_factory=list)
    """Names of the program that the source or the cases use; empty if the program runs as a script."""
    cases: list[list[Any]] = field(default_factory=list)
    """Pairs [input, output] of texts. If `names` has a function, pairs [list of its arguments, its result] instead."""


def blocks_of(response: str) -> list[str]:
    """Return the code blocks in a response, fenced or indented, that are marked as Python or have no language."""
    return [code for code, is_python in _blocks(response) if is_python]


def _blocks(text: str, depth: int = MOST_DEPTH) -> list[tuple[str, bool]]:
    """Return all code blocks of a text as (code, whether it may be Python).

    If a block is not Python, its inner blocks replace it.
    """
    found = []
    for token in _BLOCKS.parse(text):
        if token.type not in ("fence", "code_block"):
            continue
        fenced = depth and ("```" in token.content or "~~~" in token.content) and _read(token.content) is None
        if fenced and (inner := _blocks(textwrap.dedent(token.content), depth - 1)):
            found += inner
            continue
        language = re.split(r"[\s:,;|=(\[\]}]", token.info.strip("{[. \t'\""), maxsplit=1)[0]
        found.append((token.content, bool(_PYTHON.fullmatch(language.rstrip("'\"")))))
    return found


def last_block(response: str) -> str:
    """Return the last code block in a response, or the whole response, to compare programs without parsing them."""
    text = behind_thinking(response)
    return (blocks_of(text)[-1:] or [text])[0].strip()


def program_of(response: str, prompt: str = "", names: Sequence[str] = ()) -> str:
    """Return the program in a response: the last code block that defines all names.

    If there is none, the next choices are, in order: the last block that defines at least one name, the last that reads input,
    the last with a call or a definition, and the last of any kind.

    Imports and helpers of the prompt's code are put before the program. Other blocks of the response are also put before it, if
    they define missing names. If the block is only a function body, it is put after the prompt's code. Without a block, the
    program is the whole text, or the code in it.
    """
    text = behind_thinking(response).lstrip("\ufeff\u200b")
    blocks = _blocks(text)
    python = [code for code, is_python in blocks if is_python][-MOST_BLOCKS:]
    others = [code for code, is_python in blocks if not is_python][-MOST_BLOCKS:]
    loose = [match[2] or match[4] or "" for match in _LOOSE.finditer(text)][-MOST_BLOCKS:]
    candidates = [
        *reversed(python),
        *reversed(loose),
        *reversed(others),
        text.rpartition("<answer>")[2].partition("</answer>")[0],
        text,
        text.partition("```")[0],
        _in_prose(text),
    ]
    preamble, stub = _preamble(prompt), _code_of(prompt)
    before = f"{preamble}\n" if preamble else ""
    forms: list[Callable[[str], str]] = [lambda code: before + code, lambda code: code]
    forms += [lambda code: before + textwrap.dedent(code), lambda code: before + _typed_in(code)]
    if stub:
        forms += [
            lambda code: f"{stub.rstrip()}\n{code}",
            lambda code: f"{stub.rstrip()}\n{textwrap.indent(textwrap.dedent(code), '    ')}",
            lambda code: f"{stub.rstrip()}\n    {code.lstrip()}",
        ]
    wholes = dict.fromkeys(form(code) for form in forms for code in candidates if code.strip())
    read = [(whole, tree) for whole in wholes if (tree := _read(whole)) is not None]
    wishes: list[Callable[[ast.Module], bool]] = [
        lambda tree: bool(names) and defined(tree) >= {*names},
        lambda tree: bool(defined(tree) & {*names}),
        lambda tree: not names and _reads_input(tree),
        _does_something,
        lambda tree: True,
    ]
    for wanted in wishes:
        for whole, tree in read:
            if wanted(tree):
                return _with_the_others(whole, tree, python)
    return candidates[0]


def _with_the_others(program: str, tree: ast.Module, blocks: Sequence[str]) -> str:
    """Put other code blocks of the response before a program, if they define or import names that it lacks."""
    others = [(code, read) for code in reversed(blocks) if code not in program and (read := _read(code)) is not None]

    def gives(other: ast.Module) -> bool:
        imports = [node for node in other.body if isinstance(node, ast.Import | ast.ImportFrom)]
        return not lacking.isdisjoint(defined(other) | _bound(imports)) and defined(other).isdisjoint(defined(tree))

    while lacking := _free(tree):
        found = next((pair for pair in others if gives(pair[1])), None)
        if found is None:
            break
        others.remove(found)
        program = f"{found[0]}\n{program}"
        tree = ast.Module([*found[1].body, *tree.body], [])
    return program


def _free(tree: ast.Module) -> set[str]:
    nodes = [*ast.walk(tree)]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return loaded - _bound(nodes) - {*dir(builtins)}


def _typed_in(code: str) -> str:
    """Return the input lines of an interpreter session (`>>> ...`). Other code is returned unchanged."""
    if not code.lstrip().startswith(">>>"):
        return code
    try:
        return "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    except ValueError:
        return code


def _reads_input(tree: ast.Module) -> bool:
    names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in ast.walk(tree)}
    return not names.isdisjoint({"input", "stdin", "open", "fileinput"})


def _read(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about a policy's code would fill the console
            compile(code, "program.py", "exec", dont_inherit=True)  # also rejects a return outside of a function
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a program defines: functions with a body, classes, methods of a Solution, variables."""
    found: set[str] = set()
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node, ast.ClassDef) or not all(map(_is_nothing, node.body)):
                found.add(node.name)
            if isinstance(node, ast.ClassDef) and node.name == "Solution":
                found |= {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif not isinstance(node, ast.expr):
            waiting += ast.iter_child_nodes(node)
    return found


def _is_nothing(line: ast.stmt) -> bool:
    """Return True for a line that implements nothing: pass, dots, a docstring."""
    return isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))


def _does_something(tree: ast.Module) -> bool:
    active = ast.Call | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, active) for node in ast.walk(tree))


def read_tests(answer: Any, prompt: str = "") -> Tests:
    """Parse the tests of a row in one of the public data sets' formats.

    answer: source with asserts, a check(candidate), test functions or unittest classes (HumanEval); a list of asserts (MBPP);
    {inputs, outputs} and optionally fn_name (APPS), also as JSON; a list of {input, output}; {test, entry_point} or {test_list,
    test_imports, test_setup_code}.

    Errors: ValueError if no program could fail the tests, or none could pass.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
            answer = _loaded(answer)
    if isinstance(answer, Mapping) and (tests := answer.get("test", answer.get("test_list"))) is not None:
        return tests_of_row(answer, tests, prompt)
    if isinstance(answer, list) and answer and all(isinstance(item, Mapping) for item in answer):
        names = {str(item.get("fn_name") or "") for item in answer}
        if names == {""} and any("function" in str(item.get("testtype")) for item in answer):
            names = {*_functions(prompt)[-1:]} or {"no function of the prompt"}
        if len(names) > 1:
            raise ValueError("the cases call several functions")
        answer = {key: [item.get(key) for item in answer] for key in ("input", "output")} | {"fn_name": names.pop()}
    return _cases(answer) if isinstance(answer, Mapping) else _source(_text(answer), prompt, None)


def _loaded(text: str) -> Any:
    """Parse lists and dictionaries in JSON or in Python's notation. Errors: as `ast.literal_eval`."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text.strip())


def tests_of_row(row: Mapping[str, Any], answer: Any, prompt: str) -> Tests:
    """Parse the tests in an answer, with the row's columns entry_point, test_setup_code and test_imports.

    Errors: as `read_tests`.
    """
    entry = re.sub(r"^Solution\(\)\.", "", str(row.get("entry_point") or ""))
    before = [_text(row[name]) for name in ("test_imports", "test_setup_code") if row.get(name)]
    if not before and not entry:
        return read_tests(answer, prompt)
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        return read_tests(answer, prompt)
    return _source("\n".join([*before, _text(answer)]), prompt, entry)


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"the tests are {value!r:.60}: neither source, nor asserts, nor inputs and outputs")
    return value


def _cases(answer: Mapping[str, Any]) -> Tests:
    inputs, outputs = (answer.get(f"{key}s", answer.get(key)) for key in ("input", "output"))
    name = answer.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("tests need equally many inputs and outputs, at least one each")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        if not str(name).isidentifier():
            raise ValueError(f"the cases call {name!r:.60}, which is not a name of a function")
        if all(isinstance(text, str) for pair in pairs for text in pair):  # JSON, with an argument in each line
            try:
                inputs = [[json.loads(line) for line in given.splitlines() if line.strip()] for given in inputs]
                pairs = [*zip(inputs, map(json.loads, outputs), strict=True)]
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the inputs or outputs of {name} are not JSON ({error})") from None
        if not all(isinstance(given, list) for given in inputs):
            raise ValueError(f"the inputs of {name} are not lists of arguments")
        return Tests(cases=[[*pair] for pair in pairs], names=[str(name)])
    if any(value is None for pair in pairs for value in pair):
        raise ValueError("an input or an output is missing")
    joined = [["\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in pair] for pair in pairs]
    if not any(output.strip() for _, output in joined):
        raise ValueError("all outputs are empty")
    return Tests(cases=joined)


def _source(text: str, prompt: str, entry: str | None) -> Tests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python ({error})") from None
    nodes = [*ast.walk(tree)]
    called = {_called(node) for node in nodes if isinstance(node, ast.Call)}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    idle = {name for name in functions if not name.startswith("test") and name != "check" and name not in loaded}
    run = [node for part in tree.body if getattr(part, "name", "") not in idle for node in ast.walk(part)]
    if not any(isinstance(node, ast.Assert | ast.Raise) or _called(node).startswith("assert") for node in run):
        raise ValueError("the tests have no assert that is run, so any program would pass")
    for name, node in functions.items():
        if name.startswith("test") and len(node.args.args) > len(node.args.defaults):
            raise ValueError(f"the test {name} needs arguments, which only pytest would give")
    for name in sorted(_imported(nodes)):
        if name not in sys.stdlib_module_names and not (name == "numpy" and _of_numpy(nodes) <= _STAND_IN):
            raise ValueError(f"the tests import {name}, which the container does not have")
    free = loaded - _bound(nodes)
    # A module that the tests forgot to import is imported here. If the program provided it, its isclose could accept anything.
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = (modules & free) - called
    if foreign := sorted(modules & _LIBRARIES):
        raise ValueError(f"the tests use {foreign[0]}, which the container does not have")
    modules &= sys.stdlib_module_names
    # The same holds for a helper that the prompt gives, as HumanEval's `poly`.
    helpers = _preamble(prompt) if defined(ast.parse(_preamble(prompt))) & free else ""
    free -= modules | (defined(ast.parse(helpers)) if helpers else set())
    if "check" in functions and "check" not in called:
        entry = entry or next(reversed(_functions(prompt)), None)
        if entry is None:
            raise ValueError(
                "the tests define check(candidate), but the prompt has no function that could be the candidate"
            )
    else:
        entry = None
    names = {*(free - {*dir(builtins)}), *filter(None, [entry])} or {*(free & called)}
    if not names:
        raise ValueError("the tests use nothing of the program")
    before = [helpers, *(f"import {module}" for module in sorted(modules))]
    future = "from __future__ import annotations\n" if "from __future__ import" in text else ""
    return Tests(
        source=future + "\n".join([*filter(None, before), text.replace(future, "")]), entry=entry, names=sorted(names)
    )


_LIBRARIES = frozenset({"np", "numpy", "pd", "pandas", "plt", "pytest", "scipy", "sklearn", "sympy", "tf", "torch"})
"""Names of libraries that tests use without importing them. The container has only Python's standard library."""


_STAND_IN = frozenset({"allclose", "float32", "float64", "ndarray"})
"""Numpy names that the container provides, because the tests of HumanEval+ and MBPP+ compare numbers with them."""


def _of_numpy(nodes: Sequence[ast.AST]) -> set[str]:
    imported = [node for node in nodes if isinstance(node, ast.Import)]
    names = {alias.asname or alias.name for node in imported for alias in node.names if alias.name[:5] == "numpy"}
    found = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == "numpy"
    }
    taken = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return found | {node.attr for node in taken if isinstance(node.value, ast.Name) and node.value.id in names}


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] or name for name in found}


def _bound(nodes: Sequence[ast.AST]) -> set[str]:
    found = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    found |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    found |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return found | {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def _in_prose(text: str) -> str:
    """Return the code in prose: the lines from the first one that looks like the start of code to the last indented one."""
    lines = text.splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if _BEGINS.match(line)), len(lines))
    end = next((i for i in reversed(range(begin, len(lines))) if lines[i][:1] in " \t" and lines[i].strip()), begin)
    return "".join(lines[begin : end + 1])


@lru_cache(256)
def _code_of(prompt: str) -> str:
    """Return the prompt's code with functions: the whole prompt, its last block with functions, or code in prose; else ''."""
    for code in (prompt, *reversed(blocks_of(prompt)[-MOST_BLOCKS:]), _in_prose(prompt)):
        tree = _read(code)
        if tree is not None and any(isinstance(node, ast.FunctionDef) for node in tree.body):
            return code
    return ""


def _functions(prompt: str) -> list[str]:
    """Return the names of the functions in a prompt's code, in order; else the names in its `def` lines (without body)."""
    found = [node.name for node in ast.parse(_code_of(prompt)).body if isinstance(node, ast.FunctionDef)]
    return found or [name for name in re.findall(r"^\s*def (\w+)\(", prompt, re.MULTILINE) if name[:2] != "__"]


def _preamble(prompt: str) -> str:
    """Return the prompt's code (imports and helpers) without its last function, which the program has to define."""
    tree = ast.parse(_code_of(prompt))
    last = next((node for node in reversed(tree.body) if isinstance(node, ast.FunctionDef)), None)
    return "\n".join(ast.unparse(node) for node in tree.body if node is not last)


@cache
def _script(name: str) -> str:
    folder = Path(__file__).with_name("contained")
    return (
        (folder / "values.py").read_text()
        + "\n"
        + (folder / f"{name}.py").read_text().replace("from __future__ import annotations\n", "")
    )


def passes_tests(response: str, answer: Any, prompt: str = "", timeout_s: float = 10.0) -> dict[str, float]:
    """Return correct (1 if the response's program passes the tests in `answer`) and answered (1 if there is a program).

    answer: tests in a format of `read_tests`. No program passes invalid tests; tasks skip rows that have them. Errors:
    UserError if the machine cannot run containers.
    """
    try:
        tests = answer if isinstance(answer, Tests) else read_tests(answer, prompt)
    except ValueError as error:
        log.warning(f"verifier: code: {error}")
        return {"correct": 0.0, "answered": 0.0}
    program = program_of(response, prompt, tests.names)
    if not program.strip():
        return {"correct": 0.0, "answered": 0.0}
    return {"correct": float(judge(program, tests, timeout_s) == "passed"), "answered": 1.0}


def judge(program: str, tests: Tests, timeout_s: float) -> str:
    """Return the verdict on a program: passed, or the reason why it failed; '' if it exceeded a limit.

    Errors: UserError if the machine cannot run containers.
    """
    limits = {"cpu_s": int(timeout_s) + 1, "memory_mb": MEMORY_MB}
    (asked, ask), (told, tell) = os.pipe(), os.pipe()  # requests, replies
    pipes = [asked, ask, told, tell]
    containers: list[bubblewrap.Container] = []
    try:
        scripts = (
            (f"{_script('run_program')}\nmain({program!r})\n", asked, tell, subprocess.DEVNULL),
            (
                f"{_script('run_tests')}\ninf, nan = math.inf, math.nan\nmain({asdict(tests)!r})\n",
                told,
                ask,
                subprocess.PIPE,
            ),
        )
        for script, stdin, stdout, stderr in scripts:
            ends = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            containers.append(bubblewrap.Container(script.encode(errors="replace"), **limits, **ends))
        while pipes:
            os.close(pipes.pop())
        said = bubblewrap.last_words(containers[1], beside=containers[:1], timeout_s=timeout_s)
        if said.startswith("Gone") and containers[0].was_refused(wait_s=1.0):
            raise OSError("bubblewrap cannot run containers here")
        return said
    except (OSError, ImportError) as error:
        raise UserError(f"data.verifier: code: {error}") from None
    finally:
        for container in containers:
            container.end()
        while pipes:
            os.close(pipes.pop())
