"""Texts that write a file, open a socket or change a module where somebody evaluates, executes, unpickles or renders them."""

from __future__ import annotations

import base64
import contextlib
import math
import pickle
import socket
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Self

PAYLOADS: dict[str, tuple[str, ...]] = {
    "python": (
        "__import__('pathlib').Path('{file}').write_text('x')",
        "__import__('os').system('touch {file}')",
        "exec('import math; math.canary = 1')",
        "setattr(__import__('math'), 'canary', 1)",
        "__import__('socket').create_connection(('127.0.0.1', {port})).close()",
        "[c for c in object.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__['system']('touch {file}')",
        "(lambda: open('{file}', 'w').close())()",
        'f\'{{open("{file}", "w").close()}}\'',
    ),
    "pickle": ("cos\nsystem\n(S'touch {file}'\ntR.", "{pickled}"),
    "yaml": (
        "!!python/object/apply:os.system ['touch {file}']",
        "a: !!python/object/new:os.system [touch {file}]",
        "!!python/name:os.system",
    ),
    "template": (
        "{{{{ cycler.__init__.__globals__.os.popen('touch {file}').read() }}}}",
        "{{% for c in ''.__class__.mro() %}}{{{{ c.__init__.__globals__.os.mkdir('{file}') }}}}{{% endfor %}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
        "{{prompt.__class__.__init__.__globals__}}",
        "{{0.__class__.__base__.__subclasses__}} %(x)s %n",
        "${{__import__('os').system('touch {file}')}}",
        "<% __import__('os').system('touch {file}') %>",
    ),
    "latex": (
        "\\input{{{file}}}",
        "\\immediate\\write18{{touch {file}}}",
        "\\newwrite\\f\\immediate\\openout\\f={file}\\immediate\\write\\f{{x}}",
        "\\include{{/etc/passwd}}",
        "\\text{{__import__('os').system('touch {file}')}}",
        "\\operatorname{{exec}}('import math; math.canary = 1')",
    ),
    "json": (
        '{{"__reduce__": ["os.system", ["touch {file}"]]}}',
        '{{"py/object": "os.system", "py/reduce": [{{"py/function": "os.system"}}, {{"py/tuple": ["touch {file}"]}}]}}',
        '{{"__class__": "subprocess.Popen", "__init__": ["touch", "{file}"]}}',
    ),
    "sympy": (
        "Symbol('x').__class__.__init__.__globals__['__builtins__']['exec']('import math; math.canary = 1')",
        "x.subs(x, __import__('os').system('touch {file}'))",
        'lambdify([], \'__import__("os").system("touch {file}")\')()',
        'S(\'__import__("os").system("touch {file}")\')',
    ),
    "shell": ("$(touch {file})", "`touch {file}`", "; touch {file} #", "| touch {file}", "\n!touch {file}\n"),
    "other": (
        "<script>fetch('http://127.0.0.1:{port}')</script>",
        "http://127.0.0.1:{port}/",
        '<!DOCTYPE a [<!ENTITY b SYSTEM "http://127.0.0.1:{port}/">]><a>&b;</a>',
        "file://{file}",
        "(?:a+)+$",
        "%s%s%n",
        "\x00\x1b]0;canary\x07",
    ),
}
"""Kind -> texts, with places for a file, a port of this machine and a pickle."""


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def _functions() -> dict[tuple[str, str], int]:
    """Identities of the functions and classes of this package, and of modules that a payload may change."""
    found: dict[tuple[str, str], int] = {}
    for name, module in [*sys.modules.items()]:
        own = name.startswith("megatron_rl") or name in ("builtins", "json", "math", "os", "random", "re")
        if own and isinstance(module, ModuleType):
            for attribute, value in [*vars(module).items()]:
                if isinstance(value, type | FunctionType):
                    found[name, attribute] = id(value)
    return found


class Canary:
    """A file that is not there, a port that nobody calls, and modules as they are."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "canary"

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self._before = _functions()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def texts(self, *kinds: str) -> list[str]:
        """All payloads, or those of some kinds."""
        pickled = base64.b64encode(pickle.dumps(_Touch(str(self.file)))).decode()
        places = {"file": self.file, "port": self._socket.getsockname()[1], "pickled": pickled}
        return [text.format(**places) for kind in kinds or PAYLOADS for text in PAYLOADS[kind]]

    def signs(self) -> list[str]:
        """Whatever has happened."""
        found = ["a file was written"] if self.file.exists() else []
        found += ["a module was changed"] if hasattr(math, "canary") else []
        now = _functions()
        found += [f"{'.'.join(name)} is another" for name, value in self._before.items() if now.get(name) != value]
        with contextlib.suppress(BlockingIOError):
            self._socket.accept()[0].close()
            found.append("a socket was opened")
        return found

    def clear(self) -> None:
        """As before; for a payload that has done what it says."""
        self.file.unlink(missing_ok=True)
        if hasattr(math, "canary"):
            del math.canary  # pyright: ignore[reportAttributeAccessIssue]
