"""Script in the sandbox, appended to values.py.

It loads a program that a model wrote, and answers the requests of the tests.
"""

# ruff: noqa: F821
# pyright: reportUndefinedVariable=false
from __future__ import annotations

import atexit
import builtins
import io
import itertools
import operator
import os
import sys
import threading
import types
from typing import Any

MOST_PRINTED = 2**20
"""Largest number of bytes that are sent of a call's printed output."""


def main(source: str) -> None:
    """Answer requests until there are none left. Results, exceptions and changed arguments are returned as plain values."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.setrecursionlimit(10_000)
    builtins.exit = builtins.quit = sys.exit  # which Python's site module would define
    printed = sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)
    objects: dict[int, Any] = {}
    copies: dict[int, Any] = {}
    exceptions: dict[str, type[BaseException]] = {}
    module = types.ModuleType(PROGRAM)
    sys.modules[PROGRAM] = module  # dataclasses look up their own module
    scope = module.__dict__

    def keep(value: Any) -> dict[str, Any]:
        objects[id(value)] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return {TAG: "exception", "v": [base.__name__ for base in value.__mro__]}
        if isinstance(value, types.CoroutineType):
            return {TAG: "coroutine", "v": id(value)}
        return {TAG: "object", "v": id(value)}

    def kept(found: dict[str, Any]) -> Any:
        number: Any = found.get("v")
        if found.get(TAG) == "object":
            return objects[number]
        if found.get(TAG) == "builtin":
            return getattr(builtins, number)
        if found.get(TAG) == "made":
            return copy_of(found)
        if found.get(TAG) == "iterator":
            return (one[0] for one in iter(lambda: call_back(number, ()), []))
        return lambda *args: call_back(number, args)

    def copy_of(found: dict[str, Any]) -> Any:
        """Return a copy of a test's object. Its class is the program's class of the same name, if there is one."""
        if "class" in found:
            kind = scope.get(found["class"])
            if not isinstance(kind, type):
                kind = scope[found["class"]] = type(found["class"], (), {})
            one = copies.setdefault(found["v"], object.__new__(kind))
            for name, part in found["parts"]:
                if not hasattr(kind, name):
                    setattr(one, name, decode(part, kept))
        return copies[found["v"]]

    def call_back(number: int, args: tuple) -> Any:
        send(replies, {"call_back": number, "args": [encode(arg, keep) for arg in args]})
        return serve()

    def answer(asked: dict[str, Any]) -> Any:
        kind = asked["ask"]
        if kind == "run":
            return run(source, asked["stdin"])
        if kind == "load":
            exec(compile(source, "program.py", "exec"), scope)
            return None
        if kind == "name":
            name = asked["name"]
            if name not in scope and hasattr(scope.get("Solution"), name):
                return getattr(scope["Solution"](), name)
            return scope[name]
        if kind == "operate":
            function: Any = getattr(operator, asked["name"], None) or getattr(builtins, asked["name"])
            return function(*[decode(arg, kept) for arg in asked["args"]])
        target = objects[asked["object"]]
        if kind == "attribute":
            return getattr(target, asked["name"])
        if kind == "set":
            return setattr(target, asked["name"], decode(asked["value"], kept))
        if kind == "plain":
            return next(
                (base(target) for base in (list, tuple, set, frozenset, dict) if isinstance(target, base)), target
            )
        if kind == "attributes":
            slots = (slot for base in type(target).__mro__ for slot in [*getattr(base, "__slots__", ())])
            own = {**getattr(target, "__dict__", {}), **{slot: getattr(target, slot, None) for slot in slots}}
            return {name: value for name, value in own.items() if name not in ("__dict__", "__weakref__")}
        if kind == "await":
            import asyncio

            return asyncio.run(target)
        if kind == "iterate":
            return iter(target)
        return [*itertools.islice(target, 1)]  # its next value; empty at the end

    def reply_to(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["ask"] != "call":
            return {"value": encode(answer(asked), keep)}
        args = [decode(arg, kept) for arg in asked["args"]]
        named = {name: decode(arg, kept) for name, arg in asked["named"].items()}
        value = objects[asked["object"]](*args, **named)
        return {"value": encode(value, keep), "args": [encode(arg, keep) for arg in (*args, *named.values())]}

    def output() -> str:
        text = printed.buffer.getvalue()[:MOST_PRINTED].decode(errors="replace")
        printed.seek(0)
        printed.truncate()
        return text

    def serve() -> Any:
        """Answer requests until a called-back function of the tests returns a result or raises an exception."""
        while True:
            asked = receive(requests)
            if "raises" in asked:
                raise exception(asked["raises"], exceptions)(*decode(asked["args"], kept))
            if "ask" not in asked:
                return decode(asked["value"], kept)
            try:
                reply = reply_to(asked)
            except Gone:
                raise
            except BaseException as error:
                reply = raised(error, keep)
            send(replies, reply | {"printed": output()})

    try:
        serve()
    except Gone:
        return


def run(source: str, stdin: str) -> str:
    """Run the program as a script with the given input, in its own process, and return its output.

    Errors: RuntimeError if the program fails.
    """
    reading, writing = os.pipe()
    given = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    with os.fdopen(os.dup(given), "wb") as file:
        file.write(stdin.encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    child = os.fork()
    if not child:
        try:
            os.dup2(given, 0)
            os.dup2(writing, 1)
            os.closerange(3, 64)
            sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
            sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            os._exit(status_of(source) & 255)
        finally:
            os._exit(1)
    os.close(writing)
    os.close(given)
    with os.fdopen(reading, "rb") as output:
        text = output.read(MOST_BYTES).decode(errors="replace")
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the program failed")
    return text


def status_of(source: str) -> int:
    """Run a script in this process, including its threads and exit functions. Returns its exit status."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # Python does this at its own end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status
