"""Script in the sandbox, appended to values.py. It tests a program that runs in another container, and reports the verdict.

The tests call the program's functions over a pipe. A result has exactly a built-in type, or is a reference to an object that
stays in the program and equals no plain value. All comparisons are therefore made in this script, whatever a program does to
its own interpreter.
"""

# ruff: noqa: F821
# pyright: reportUndefinedVariable=false
from __future__ import annotations

import ast
import builtins
import itertools
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


class Remote:
    """Reference to an object of the program. It can be called and iterated, and has the object's attributes.

    This script compares the object's content, element by element. mixed: True if the object is the result of an operator
    between another object of the program and a value of the tests. This script never asks the program whether such a result is
    true, because the program could then decide a comparison with the value.
    """

    def __init__(self, number: int, *, mixed: bool = False) -> None:
        self.__dict__.update(_number=number, _mixed=mixed)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the object in the program and return the result."""
        return LINK.call(self._number, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LINK.ask("attribute", object=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        LINK.ask("set", object=self._number, name=name, value=encode(value, LINK.keep))

    def __bool__(self) -> bool:
        if self._mixed:
            raise TypeError("the program gave an object, and no value")
        return LINK.operate("truth", self)

    def __eq__(self, other: Any) -> bool:
        """Compare two objects by the program's answer and by their attributes.

        Containers of values are compared in this script.
        """
        if isinstance(other, Remote):
            if self._mixed or other._mixed:
                return False
            return LINK.operate("eq", self, other) is True and LINK.hold_the_same(self._number, other._number)
        if not isinstance(other, list | tuple | set | frozenset | dict):
            return False
        value = LINK.ask("plain", object=self._number)
        return not isinstance(value, Remote) and value == other

    def __hash__(self) -> int:
        return LINK.operate("hash", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and LINK.operate("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, Remote) and LINK.operate("issubclass", subclass, self) is True

    def __enter__(self) -> Any:
        return self._special("__enter__")

    def __exit__(self, *error: object) -> None:
        """Leave the context. An error in the context is never suppressed, because it is the test's own error."""
        self._special("__exit__", None, None, None)

    def __iter__(self) -> Any:
        return LINK.ask("iterate", object=self._number)

    def __next__(self) -> Any:
        found = LINK.ask("next", object=self._number)
        if not found:
            raise StopIteration
        return found[0]

    def _special(self, name: str, *args: Any) -> Any:
        try:
            method = LINK.ask("attribute", object=self._number, name=name)
        except AttributeError as error:  # list() and other functions do not expect an AttributeError
            raise TypeError(str(error)) from None
        return method(*args)

    def __str__(self) -> str:
        return self._special("__str__")

    def __repr__(self) -> str:
        return self._special("__repr__")

    def __len__(self) -> int:
        return self._special("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        self._special("__delitem__", key)

    def __contains__(self, item: Any) -> bool:
        return item in list(self)


def operation(name: str, *, turned: bool = False) -> Callable[..., Any]:
    """Return a method for an operator.

    If an operand is a value of a test, the method raises TypeError for a result that is a plain value.
    """

    def method(self: Remote, *other: Any) -> Any:
        found = LINK.operate(name, *((*other, self) if turned else (self, *other)))
        if other and isinstance(other[0], Remote) and not (self._mixed or other[0]._mixed):
            return found
        if isinstance(found, Remote):
            return Remote(found._number, mixed=bool(other) or self._mixed)
        raise TypeError("the program gave an object, and no value")

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.strip('_')}__", operation(_name))
    setattr(Remote, f"__r{_name.strip('_')}__", operation(_name, turned=True))
for _name in ("lt", "le", "gt", "ge", "neg"):
    setattr(Remote, f"__{_name}__", operation(_name))


class Link:
    """The pipe to the program's container."""

    def __init__(self) -> None:
        self.requests, self.replies = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
        self.functions: list[Any] = []
        self.exceptions: dict[str, type[BaseException]] = {}
        self.calls = 0
        self.lock = threading.RLock()  # for tests with threads
        self.sent: dict[int, Any] = {}
        """Objects of the tests that were sent, by id. They are kept so that no other object gets the same id."""
        self.sending: set[int] = set()
        """Ids of the test objects in the message that is being built."""
        self.compared: set[frozenset[int]] = set()
        """Pairs of objects that are being compared. They are needed for lists that contain themselves."""

    def keep(self, value: Any) -> dict[str, Any]:
        """Return the message that represents an object of the tests. The program can call the object if it is a function."""
        if isinstance(value, Remote):
            return {TAG: "object", "v": value._number}
        if not callable(value) and type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
            return self.parts_of(value)
        if isinstance(value, Iterator):
            self.functions.append(lambda: [*itertools.islice(value, 1)])
            return {TAG: "iterator", "v": len(self.functions) - 1}
        if not callable(value):
            raise TypeError(f"a test passes {type(value).__name__}, which cannot be sent to a program")
        name = getattr(value, "__name__", "")
        if getattr(builtins, name, None) is value:
            return {TAG: "builtin", "v": name}
        self.functions.append(value)
        return {TAG: "function", "v": len(self.functions) - 1}

    def parts_of(self, value: Any) -> dict[str, Any]:
        """Return the parts of an object of a test's class, so that the program can copy it. A message contains them once."""
        message = {TAG: "made", "v": id(value)}
        if id(value) not in self.sending:
            self.sending.add(id(value))
            self.sent[id(value)] = value
            kind = type(value)
            methods = [
                name for name in dir(kind) if name[0] != "_" and isinstance(vars(kind).get(name), types.FunctionType)
            ]
            parts = {name: getattr(value, name) for name in methods} | vars(value)
            message |= {
                "class": kind.__name__,
                "parts": [[name, encode(part, self.keep)] for name, part in parts.items()],
            }
        return message

    def kept(self, found: dict[str, Any]) -> Any:
        """Return the object that a reference from the program stands for."""
        if found.get(TAG) == "exception":
            return exception(found.get("v"), self.exceptions)
        if found.get(TAG) not in ("object", "coroutine") or type(found.get("v")) is not int:
            raise Gone("an unknown value")
        return Remote(found["v"]) if found[TAG] == "object" else self.awaited(found["v"])

    async def awaited(self, number: int) -> Any:
        """Wait for a coroutine in the program and return its result."""
        return self.ask("await", object=number)

    def operate(self, name: str, *args: Any) -> Any:
        """Return the result of an operator, or of a built-in function, that the program computes."""
        self.sending.clear()
        return self.ask("operate", name=name, args=[encode(arg, self.keep) for arg in args])

    def hold_the_same(self, one: int, other: int) -> bool:
        """Return True if two objects of the program have equal attributes.

        The program's own comparison might always return True.
        """
        pair = frozenset((one, other))
        if len(pair) == 1 or pair in self.compared:
            return True
        self.compared.add(pair)
        try:
            return self.ask("attributes", object=one) == self.ask("attributes", object=other)
        finally:
            self.compared.discard(pair)

    def ask(self, what: str, **more: Any) -> Any:
        """Send a request and return the value of the reply. Errors: the program's exception; Gone if the program has ended."""
        return decode(self._reply({"ask": what, **more})["value"], self.kept)

    def call(self, number: int, args: tuple, named: dict[str, Any]) -> Any:
        """Call an object of the program. If it returns None, its changes to arguments are copied back.

        Only changes to a list, dict or set are copied back. If the program returns a value, the arguments stay unchanged: a
        program could otherwise change the objects with which a test compares the value.
        """
        self.calls += 1
        self.sending.clear()
        sent = [encode(arg, self.keep) for arg in args]
        others = {name: encode(arg, self.keep) for name, arg in named.items()}
        reply = self._reply({"ask": "call", "object": number, "args": sent, "named": others})
        value = decode(reply["value"], self.kept)
        if value is not None or not isinstance(reply.get("args"), list):
            return value
        given = zip((*args, *named.values()), (*sent, *others.values()), reply["args"], strict=False)
        for arg, before, after in given:
            if before != after and not isinstance(arg, Remote) and hasattr(arg, "clear"):
                changed = decode(after, self.kept)
                if type(changed) is type(arg):
                    arg.clear()
                    (arg.extend if hasattr(arg, "extend") else arg.update)(changed)
        return None

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            return self._answered(request)

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        send(self.requests, request)
        while True:
            reply = receive(self.replies)
            if isinstance(printed := reply.get("printed"), str):
                sys.stdout.write(printed)  # for tests that check the output
            if "raises" in reply:
                kind = exception(reply["raises"], self.exceptions)
                raise kind(*decode(reply.get("args", []), self.kept))
            if "call_back" not in reply:
                if "value" not in reply:
                    raise Gone("a reply without a value")
                return reply
            send(self.requests, self._called_back(reply["call_back"], decode(reply.get("args"), self.kept)))

    def _called_back(self, number: Any, args: Any) -> dict[str, Any]:
        if type(number) is not int or not 0 <= number < len(self.functions) or type(args) is not list:
            raise Gone("no function of a test")
        try:
            return {"value": encode(self.functions[number](*args), self.keep)}
        except AssertionError:
            raise  # the test's own error, which a program must not be able to catch
        except Exception as error:
            if type(error).__module__ == "__main__":
                self.exceptions[type(error).__name__] = type(error)
            return raised(error, self.keep)


def check(source: str, entry: str | None, names: list[str]) -> None:
    """Run tests that are Python source: asserts, `check(candidate)`, test functions and classes. Errors: a test's exception."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if "numpy" in source:
        sys.modules["numpy"] = numpy = types.ModuleType("numpy")
        vars(numpy).update(allclose=close, ndarray=type("ndarray", (), {}), float32=float, float64=float)
    scope = module.__dict__
    for name in names:
        try:
            scope[name] = LINK.ask("name", name=name)
        except KeyError:
            continue
        LINK.calls += not isinstance(scope[name], Remote | type)  # a value that the tests use counts as a call
    try:
        exec(compile(ast.parse(source, "tests.py"), "tests.py", "exec"), scope)
    except SystemExit as end:  # from unittest.main()
        if end.code or type(end) is not SystemExit:
            raise
    own = {name: value for name, value in scope.items() if name not in names}
    if entry is not None:
        scope["check"](scope[entry])
    for name, value in own.items():
        if name.startswith("test") and isinstance(value, types.FunctionType):
            run_test(value)
        if name.startswith("Test") and isinstance(value, type) and not hasattr(value, "assertEqual"):
            run_tests_of(value)
    if "unittest" not in sys.modules:
        return
    import unittest

    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    if not suite.countTestCases():
        return
    suite.run(result := unittest.TestResult())
    if not result.wasSuccessful() or len(result.skipped) >= result.testsRun:  # a program may make a test skip itself
        raise AssertionError(f"{len(result.failures) + len(result.errors)} tests failed")


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Replacement for numpy's allclose, for numbers and for lists of numbers with equal lengths."""
    if isinstance(expected, list | tuple):
        lists = isinstance(found, list | tuple) and len(found) == len(expected)
        return lists and all(close(one, other, rtol, atol) for one, other in zip(found, expected, strict=True))
    if type(found) not in (int, float) or not isinstance(expected, int | float) or not math.isfinite(expected):
        return type(found) is type(expected) and found == expected
    return abs(found - expected) <= atol + rtol * abs(expected)


def run_test(test: Callable[[], Any]) -> None:
    """Run a test function, which may be asynchronous."""
    if isinstance(result := test(), types.CoroutineType):
        import asyncio

        asyncio.run(result)


def run_tests_of(kind: type) -> None:
    """Run the tests of a class as pytest does: each test gets its own object."""
    for name in [name for name in dir(kind) if name.startswith("test")]:
        one = kind()
        if (before := getattr(one, "setup_method", None)) is not None:
            before(*[getattr(one, name)][: before.__code__.co_argcount - 1])
        run_test(getattr(one, name))


def compare(cases: list, name: str | None) -> None:
    """Compare the program's results with the expected outputs. Errors: AssertionError if they differ."""
    function = LINK.ask("name", name=name) if name else None
    for given, expected in cases:
        if function is None:
            found = LINK.ask("run", stdin=given)
            LINK.calls += 1
            assert isinstance(found, str) and same_text(found, expected)
        else:
            found = plain(function(*given))
            assert same(found, plain(expected)) or same([found], plain(expected))


def plain(value: Any) -> Any:
    """Convert tuples to lists, as in JSON."""
    if isinstance(value, Remote):
        value = LINK.ask("plain", object=value._number)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {str(key): plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def same(found: Any, expected: Any) -> bool:
    """Return True if two values are equal. Floats are compared to nine digits."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, int | float) and not isinstance(found, bool) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return bool(found == expected)


def same_text(found: str, expected: str) -> bool:
    """Return True if two outputs are equal word by word. Numbers with a decimal point are compared to nine digits."""
    words = [text.split() for text in (found, expected)]
    return len(words[0]) == len(words[1]) and all(map(same_word, *words))


def same_word(found: str, expected: str) -> bool:
    """Return True if two words are equal in the sense of `same_text`."""
    if found == expected or "." not in expected:
        return found == expected
    try:
        return math.isclose(float(found), float(expected), rel_tol=1e-9, abs_tol=1e-9)
    except ValueError:
        return False


def main(tests: dict[str, Any]) -> None:
    """Run the tests and write the verdict to standard error. A program that the tests never call does not pass."""
    global LINK
    LINK = Link()
    nothing, verdict = os.open("/dev/null", os.O_RDWR), os.dup(2)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.setrecursionlimit(10_000)
    source, names = tests["source"], tests["names"]
    try:
        if source is not None or names:
            LINK.ask("load")
        if source is None:
            compare(tests["cases"], names[0] if names else None)
        else:
            check(source, tests["entry"], names)
        result = "passed" if LINK.calls else "nothing of the program was tested"
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"[:300]
    os.write(verdict, result.encode(errors="replace"))
    os._exit(0)
