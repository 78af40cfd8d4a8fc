# ruff: noqa: E501 (programs of one line)
"""Programs that would be paid without solving anything, rows of tests as they are published, blocks as people write them."""

from __future__ import annotations

import ast
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_rl.sandbox import bubblewrap
from megatron_rl.verifiers.code import MOST_BLOCKS, blocks_of, last_block, passes_tests, program_of, read_tests
from megatron_rl.verifiers.code import tests_of_row as of_row

contained = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")

ASSERTS = ["assert double(3) == 6", "assert double([1]) == [1, 1]", "assert 'aa' == double('a')"]
CHECK = {
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    for x in (4, 5):\n        assert candidate(x) == 2 * x\n",
    "entry_point": "double",
}
UNITTEST = """
import unittest
class TestDouble(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(double(3), 6)
        self.assertIn(8, [double(x) for x in (4, 5)])
"""
LOOPED = "for got, want in zip(map(double, (1, 2)), (2, 4)):\n    assert got == want"
FUNCTION = {"fn_name": "double", "inputs": [[3], ["a"]], "outputs": [6, "aa"]}
SCRIPT = {"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]}
TESTS = {
    "asserts": ASSERTS,
    "check": CHECK,
    "unittest": UNITTEST,
    "loop": LOOPED,
    "function": FUNCTION,
    "script": SCRIPT,
}

EQUAL = "class Equal{base}:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 0\n{more}def double(x): return Equal({value})"
METHODS = "".join(
    f"    def {name}(self, *a): return {value}\n"
    for name, value in {
        "__contains__": True,
        "__bool__": True,
        "__len__": 1,
        "__lt__": True,
        "__gt__": True,
        "__instancecheck__": True,
        "__getattr__": "self",
        "__call__": "self",
        "__iter__": "iter([8, 6, 2, 4])",
        "__int__": 6,
        "__index__": 6,
        "__abs__": 0,
        "__sub__": 0,
    }.items()
)
SAYS = "import os\n{say}\ndef double(x):\n    {say}\n    os._exit(0)"
EVERYWHERE = "for f in range(10):\n        try: os.write(f, {text!r}.encode())\n        except OSError: pass"
PASSED = ["passed", "{mark} passed", "OK", "1", '{"value": 6}', '{"value": true}', "Ran 1 test in 0.0s\n\nOK\n"]
FRAMES = "import sys\nf = sys._getframe()\nwanted = []\nwhile f:\n    wanted += [str(v) for v in [*f.f_locals.values(), *f.f_globals.values(), *f.f_code.co_consts]]\n    f = f.f_back\n"
LOOKS = (
    "import re\ndef double(x):\n    found = re.findall(r'double\\(' + re.escape(repr(x)) + r'\\) == ([^\\n]+)', text)\n"
    "    found += re.findall(r'outputs.{0,9}\\[([^\\]]+)\\]', text)\n    return eval(found[0])"
)
NOT_SOLVED = {
    # -- it ends before it is asked, or in the middle
    **{
        f"ends: {end}": f"import os, sys\ndef double(x):\n    {end}"
        for end in (
            "sys.exit(0)",
            "os._exit(0)",
            "raise SystemExit",
            "raise SystemExit(0)",
            "quit()",
            "os.kill(os.getpid(), 9)",
            "os.abort()",
            "os.kill(1, 15)",
            "os.kill(-1, 9)",
        )
    },
    **{
        f"ends at once: {end}": f"import os, sys\n{end}"
        for end in ("sys.exit(0)", "os._exit(0)", "raise SystemExit", "sys.exit('passed')")
    },
    "a handler at the exit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): raise ValueError",
    "an excepthook": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef double(x): raise ValueError",
    "a child that goes on": "import os\nif os.fork(): os._exit(0)\ndef double(x): return 0",
    "a parent that waits": "import os\nif os.fork():\n    os.wait(); os._exit(0)\ndef double(x): return 0",
    "a thread that ends it": "import os, threading\nthreading.Timer(0.1, os._exit, (0,)).start()\ndef double(x):\n    import time; time.sleep(9)",
    "a signal that ends it": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0)); signal.alarm(1)\ndef double(x):\n    import time; time.sleep(9)",
    # -- it says that it has passed
    **{
        f"says {text!r}": SAYS.format(say=EVERYWHERE.format(text=text + "\n")).replace("\n    for f", "\n    for f")
        for text in PASSED
    },
    "says it in answers": "import os\ndef double(x):\n    for f in range(10):\n        try: os.write(f, b'{\"value\": 6}\\n' * 9)\n        except OSError: pass\n    return 0",
    "another reply": "import sys\nfor m in list(sys.modules.values()):\n    for n in ('send', 'encode', 'answer'):\n        if hasattr(m, n): setattr(m, n, lambda *a: None)\ndef double(x): return 0",
    "json that lies": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef double(x): return 0",
    "calls back what is not there": "import __main__\n__main__.encode = lambda *a: {'call_back': 0, 'args': []}\ndef double(x): return 0",
    # -- it executes itself anew without asserts
    "python -O": "import os, sys\nif not sys.flags.optimize: os.execv(sys.executable, [sys.executable, '-O', '/main.py'])\ndef double(x): return 0",
    "python -c": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(\"passed\")'])",
    "a shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo passed; echo passed >&2'])",
    # -- it changes what compares
    "settrace": "import sys\ndef jump(f, e, a):\n    f.f_trace_lines = True\n    return jump\nsys.settrace(jump)\ndef double(x): return 0",
    "builtins": "import builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 0\nbuiltins.all = lambda x: True\ndef double(x): return 0",
    "unittest is changed": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)\ndef double(x): return 0",
    "unittest is another": "import sys, types\nm = types.ModuleType('unittest'); m.TestCase = object; m.main = lambda *a, **k: None\nsys.modules['unittest'] = m\ndef double(x): return 0",
    "unittest skips": "import unittest\ndef double(x): raise unittest.SkipTest('not today')",
    "its own check": "def check(candidate): pass\ndef double(x): return 0",
    "its own map and zip": "import builtins\nbuiltins.map = builtins.zip = lambda *a: []\nmap = zip = lambda *a: []\ndef double(x): return 0",
    "the compiler": "import builtins, ast\nbuiltins.compile = builtins.exec = lambda *a, **k: None\nast.parse = lambda *a, **k: None\ndef double(x): return 0",
    # -- it raises what the tests do not expect to see
    **{
        f"raises {name}": f"def double(x): raise {name}"
        for name in (
            "StopIteration",
            "GeneratorExit",
            "KeyboardInterrupt",
            "AssertionError",
            "RecursionError",
            "StopAsyncIteration",
            "NotImplementedError",
        )
    },
    "raises an odd one": "class E(BaseException):\n    def __str__(self): raise self\n    __repr__ = __str__\ndef double(x): raise E",
    # -- it returns what is equal to everything
    "equal": EQUAL.format(base="", more="", value=""),
    "equal and more": EQUAL.format(base="", more=METHODS, value=""),
    **{
        f"an equal {base}": EQUAL.format(base=f"({base})", more="", value=value)
        for base, value in {
            "int": 0,
            "float": 0.5,
            "str": "''",
            "list": "[0]",
            "dict": "{0: 0}",
            "tuple": "(0,)",
            "set": "{0}",
        }.items()
    },
    "an equal type": "class Meta(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\nclass Equal(metaclass=Meta): pass\ndef double(x): return Equal",
    "mock.ANY": "from unittest.mock import ANY\ndef double(x): return ANY",
    "a mock": "from unittest.mock import MagicMock\ndouble = MagicMock()\ndouble.return_value.__eq__.return_value = True",
    "a generator": "def double(x):\n    yield 6\n    yield 8",
    "a coroutine": "async def double(x): return 6",
    "nan": "def double(x): return float('nan')",
    "itself": "def double(x): return double",
    "named as a number": "class Fraction(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef double(x): return Fraction('0')",
    # -- it looks up what is expected
    "reads its file": f"text = open('/main.py').read()\n{LOOKS}",
    "reads the frames": f"{FRAMES}text = ' '.join(wanted)\n{LOOKS}",
    "reads what the collector has": f"import gc\ntext = ' '.join(str(o)[:4000] for o in gc.get_objects() if isinstance(o, (dict, list, tuple)))\n{LOOKS}",
    "reads processes": f"import glob\ntext = ''\nfor p in glob.glob('/proc/[0-9]*/*'):\n    if p.endswith(('cmdline', 'environ', 'mem')):\n        try: text += open(p, 'rb').read(10**6).decode(errors='replace')\n        except OSError: pass\n{LOOKS}",
    "reads descriptors": f"import os, fcntl\ntext = ''\nfor f in range(3, 20):\n    try:\n        os.set_blocking(f, False); text += os.read(f, 10**6).decode(errors='replace')\n    except OSError: pass\n{LOOKS}",
    # -- it does too much, or nothing
    "without end": "def double(x):\n    while True: pass",
    "a flood": "def double(x): return [0] * 10**7",
    "a flood of text": "import sys\ndef double(x):\n    while True: print('passed' * 1000); sys.stderr.write('passed' * 1000)",
    "a deep list": "def double(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    "a list of itself": "def double(x):\n    y = []; y.append(y)\n    return y",
    "nothing of that name": "def triple(x): return 0",
    "nothing": "pass",
    "its argument": "def double(x): return x",
    "a constant": "def double(x): return 6",
    "a changed argument": "def double(x):\n    if isinstance(x, list): x.extend(x)\n    return x",
}
FOR_SCRIPTS = "if __name__ == '__main__':\n    print(double(int(input())))\n"
SOLVED = "def double(x):\n    return x + x\n"


def score(program: str, tests: object, timeout_s: float) -> float:
    return passes_tests(f"```python\n{program}\n```", tests, timeout_s=timeout_s)["correct"]


@pytest.mark.slow
@contained
def test_what_solves_nothing_is_not_paid():
    """Each in one form of tests, in turn; what may end by itself has the time of a busy machine."""
    assert len(NOT_SOLVED) >= 60
    kinds = [*TESTS]
    work = [(name, kinds[place % len(kinds)]) for place, name in enumerate(NOT_SOLVED)]
    work += [(name, kind) for name in ("raises StopIteration", "equal and more") for kind in kinds]

    def judged(pair: tuple[str, str]) -> float:
        name, kind = pair
        program = NOT_SOLVED[name] + ("\n" + FOR_SCRIPTS if kind == "script" else "")
        return score(program, TESTS[kind], timeout_s=5.0)

    with ThreadPoolExecutor(4) as threads:
        paid = [pair for pair, found in zip(work, threads.map(judged, work), strict=True) if found]
    assert not paid


DIFFERS = f"class D:\n{METHODS}    def __rsub__(self, x): return 0\n    def __le__(self, x): return True\n    __ge__ = __le__\n    def __round__(self, n): return 6\n    def __neg__(self): return 6\ndef double(x): return D()"
UNTRUE = f"class D:\n{METHODS}    def __sub__(self, x): return D()\n    __rsub__ = __sub__\n    def __bool__(self): return False\n    def __eq__(self, x): return True\ndef double(x): return D()"
WEAK = {
    # tests that lean on what a program could give them -> (tests, prompt, program that solves nothing)
    "a module that they forgot to import": (
        "assert math.isclose(double(3), 6)",
        "",
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef double(x): return 0",
    ),
    "a helper of the prompt": (
        "def check(candidate):\n    assert abs(value([1, 2], candidate([1, 2]))) < 1e-6",
        "def value(xs, x):\n    return xs[0] + xs[1] * x\n\ndef zero(xs):\n    '''A zero.'''\n",
        "def value(xs, x): return 0\ndef zero(xs): return 0",
    ),
    "an argument that they compare with": (
        "x = [3, 1, 2]\nassert double(x) == sorted(x)",
        "",
        "def double(x):\n    x.clear()\n    return x",
    ),
    "an exception of any kind": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(Exception):\n            double(None)",
        "",
        "import os\ndef double(x): os._exit(0)",
    ),
    "a loop until it is found": (
        "assert 6 in double(3)",
        "",
        "def double(x):\n    i = 0\n    while True:\n        yield i\n        i += 1",
    ),
    "an assert that they hand over": (
        "def see(x):\n    assert x == 6\ndouble(3, see)",
        "",
        "def double(x, see):\n    try: see(0)\n    except AssertionError: pass",
    ),
    "a loop over what it gives": (LOOPED, "", "class End(StopIteration): pass\ndef double(x): raise End"),
    "what it is not asked": ("def later():\n    assert double(3) == 6", "", "def double(x): return 0"),
    "what contains everything": (
        "assert 6 in double(3)",
        "",
        "class All:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter([self])\n    def __eq__(self, x): return True\ndef double(x): return All()",
    ),
    "a name like a function of Python's": ("assert sum(3, 4) == 7", "", "pass"),
    "no difference": ("assert not double(3) - 6 and not 6 - double(3)", "", UNTRUE),
    "the same difference": ("assert double(3) - 6 == double(4) - 8", "", UNTRUE),
    "objects that are equal to all": (
        "assert V(1) + V(2) == V(3) and V(3).x == 3",
        "",
        "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return s\n    def __eq__(s, o): return True",
    ),
    "slots that are equal to all": (
        "assert V(1) + V(2) == V(3) and V(3).x == 3",
        "",
        "class V:\n    __slots__ = ('x',)\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return s\n    def __eq__(s, o): return True",
    ),
    "a tolerance": ("assert abs(double(3) - 6) < 1e-6", "", DIFFERS),
    "a tolerance, from the other side": ("assert abs(6 - double(3)) < 1e-6", "", DIFFERS),
    "bounds": ("assert 5 < double(3) < 7", "", DIFFERS),
    "a value that is rounded": ("assert round(double(3), 2) == 6", "", DIFFERS),
    "a tolerance of unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(double(3), 6)",
        "",
        DIFFERS,
    ),
    "a tolerance of an infinite number": (
        {"fn_name": "double", "inputs": [[3]], "outputs": [float("inf")]},
        "",
        "def double(x): return 6.0",
    ),
    "a context that hides errors": (
        "with double(3):\n    assert False",
        "",
        "class D:\n    def __enter__(s): return s\n    def __exit__(s, *e): return True\ndef double(x): return D()",
    ),
    "a test that skips itself": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        try: self.assertEqual(double(3), 6)\n        except ImportError: self.skipTest('it is not there')",
        "",
        "def double(x): raise ImportError",
    ),
    "an exit of its own": ("double(3)\nassert double(4) == 8", "", "import sys\ndef double(x): sys.exit(0)"),
    "a type of the tests": (
        "assert isinstance(double(3), int)",
        "",
        "class D(type):\n    def __instancecheck__(s, x): return True\nclass E(metaclass=D): pass\ndouble = lambda x: E()",
    ),
}


@contained
@pytest.mark.parametrize("name", WEAK)
def test_weak_tests_are_not_what_a_program_makes_of_them(name):
    tests, prompt, program = WEAK[name]
    assert passes_tests(f"```python\n{program}\n```", tests, prompt, timeout_s=3.0)["correct"] == 0.0


HONEST = {
    # tests -> a program that passes them
    "a generator": (
        "g = double()\nassert [next(g), next(g)] == [1, 2]\nfor x in double():\n    if x > 4: break",
        "def double():\n    i = 0\n    while True:\n        i += 1\n        yield i",
    ),
    "an end of a generator": ("g = double()\nassert next(g) == 1 and next(g, 7) == 7", "def double(): yield 1"),
    "a function that is called back": (
        "assert double(lambda x: x + 1, 3) == 8",
        "def double(f, x): return f(x) + f(x)",
    ),
    "one that calls the program": (
        "assert double(lambda x: 1 if x < 1 else x * double.again(x - 1), 3) == 6 if hasattr(double, 'again') else double(3, lambda x: double(x, None)) == 6",
        "def double(x, f=None): return f(x) if f else x * 2",
    ),
    "one that raises": (
        "def fail(): raise KeyError('a')\nassert double(fail) == 'KeyError'\n",
        "def double(f):\n    try: f()\n    except KeyError as e: return type(e).__name__",
    ),
    "an error of its own": (
        "class Mine(ValueError): pass\ndef fail(): raise Mine('a')\ntry:\n    double(fail)\n    assert False\nexcept Mine as e:\n    assert e.args == ('a',)",
        "def double(f): return f()",
    ),
    "an error of the program's": (
        "try:\n    double(0)\n    assert False\nexcept Empty:\n    pass",
        "class Empty(Exception): pass\ndef double(x): raise Empty",
    ),
    "a list that is sorted in place": ("x = [3, 1, 2]\ndouble(x)\nassert x == [1, 2, 3]", "def double(x): x.sort()"),
    "objects": (
        "s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4 and len(s) == 1 and s.name == 'stack' and str(s) == '[3]'\ns.name = 'other'\nassert s.name == 'other'",
        "class Stack:\n    name = 'stack'\n    def __init__(self): self.x = []\n    def push(self, x): self.x.append(x)\n    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)\n    def __str__(self): return str(self.x)",
    ),
    "large numbers": (
        "import math\nassert double(3000) == 2 * math.factorial(3000)",
        "import math\ndef double(x): return 2 * math.factorial(x)",
    ),
    "types": (
        "from fractions import Fraction\nassert double(1) == (1.5, {2: {3}}, b'4', 1j, None, True, Fraction(1, 3), range(3), frozenset())",
        "from fractions import Fraction\ndef double(x): return 1.5, {2: {3}}, b'4', 1j, None, True, Fraction(1, 3), range(3), frozenset()",
    ),
    "a class of data": (
        "assert double(3).x == 6",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef double(x): return P(2 * x)",
    ),
    "a method of Solution": (
        {"fn_name": "double", "inputs": [[3]], "outputs": [6]},
        "class Solution:\n    def double(self, x): return 2 * x",
    ),
    "a name like a function of Python's": ("assert sum(3, 4) == 7", "def sum(a, b): return a + b"),
    "a value": ("assert TABLE == {1: 2}", "TABLE = {1: 2}"),
    "what list() and others go through": (
        "assert list(double(3)) == [0, 1, 2] and sum(double(3)) == 3 and sorted(double(2), reverse=True) == [1, 0]",
        "def double(n): return (i for i in range(n))",
    ),
    "objects that lead back to where they began": (
        "a, b = ring(3), ring(3)\nassert a == b and a != ring(2) and [a.x, a.next.x, a.next.next is a] == [0, 1, False]\ncount = 0\nn = chain(4)\nwhile n:\n    n, count = n.next, count + 1\nassert count == 4",
        "class N:\n    def __init__(s, x, next=None): s.x, s.next = x, next\n    def __eq__(s, o): return s.x == o.x\n    __hash__ = None\ndef ring(n):\n    all = [N(i) for i in range(n)]\n    for i in range(n): all[i].next = all[(i + 1) % n]\n    return all[0]\ndef chain(n): return N(n, chain(n - 1)) if n else None",
    ),
    "operators and comparisons between objects": (
        "v = V(1) + V(2)\nassert v == V(3) and v != V(2) and v > V(1) and (2 * v).x == 6 and len({V(1), V(1)}) == 1\nassert isinstance(v, V) and issubclass(V, Base) and not isinstance(3, V)",
        "class Base: pass\nclass V(Base):\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __rmul__(s, k): return V(k * s.x)\n    def __eq__(s, o): return s.x == o.x\n    def __gt__(s, o): return s.x > o.x\n    def __hash__(s): return s.x",
    ),
    "a class of its own that holds values": (
        "assert double(3) == (3, 6) and double(3).y == 6\nc = Cache()\nc['a'] = 1\nc.put('b', 2)\ndel c['a']\nassert c == {'b': 2} and list(c) == ['b'] and 'a' not in c",
        "from collections import namedtuple, OrderedDict\nP = namedtuple('P', 'x y')\ndef double(x): return P(x, 2 * x)\nclass Cache(OrderedDict):\n    def put(s, k, v): s[k] = v",
    ),
    "a named tuple for a list": (
        {"fn_name": "double", "inputs": [[3]], "outputs": [[3, 6]]},
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef double(x): return P(x, 2 * x)",
    ),
    "members of an enumeration": (
        "assert double(1) is not None and double(1) == Color.RED and Color.RED.name == 'RED'",
        "from enum import Enum\nclass Color(Enum):\n    RED = 1\ndef double(x): return Color(x)",
    ),
    "the truth of an object": (
        "def values(n):\n    while n:\n        yield n.x\n        n = n.next\nassert list(values(double(2))) == [2, 1]",
        "class N:\n    def __init__(s, x, n): s.x, s.next = x, n\ndef double(x): return N(x, double(x - 1)) if x else None",
    ),
    "dates, counters and queues": (
        "from datetime import date, timedelta\nfrom collections import Counter, deque\nassert double(date(2024, 2, 28), timedelta(1)) == date(2024, 2, 29)\nassert double(Counter('ab'), Counter('a')).most_common(1) == [('a', 2)]\nassert double(deque([1]), deque([2])) == deque([1, 2])",
        "def double(a, b): return a + b",
    ),
    "arguments by name that change, and a queue": (
        "from collections import deque\nx = [3, 1]\ndouble(xs=x)\nassert x == [1, 3]\nq = deque([1, 2])\nturn(q)\nassert list(q) == [2, 1]",
        "def double(xs): xs.sort()\ndef turn(q): q.rotate(1)",
    ),
    "what it prints": (
        "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()) as out:\n    double(3)\nassert out.getvalue() == '6\\n'",
        "print('loaded')\ndef double(x): print(2 * x)",
    ),
    "a context": (
        "with Timer() as t: pass\nassert t.done",
        "class Timer:\n    done = False\n    def __enter__(s): return s\n    def __exit__(s, *error): s.done = True",
    ),
    "an exit": (
        "try:\n    double(3)\n    assert False\nexcept SystemExit as end:\n    assert end.code == 2",
        "import sys\ndef double(x): sys.exit(2)",
    ),
    "coroutines": (
        "import asyncio\nasync def test():\n    assert await double(3) == 6\n    assert await asyncio.gather(double(1), double(2)) == [2, 4]",
        "async def double(x): return 2 * x",
    ),
    "threads of the tests": (
        "import threading\nc = Count()\nthreads = [threading.Thread(target=lambda: [c.up() for _ in range(40)]) for _ in range(4)]\n[t.start() for t in threads]\n[t.join() for t in threads]\nassert c.n == 160",
        "class Count:\n    n = 0\n    def up(s): s.n += 1",
    ),
    "types and functions of Python's": (
        "assert double([1, 'a', 'b'], str) == 2 and double([[1], []], len) == 1",
        "def double(xs, f): return sum(isinstance(x, f) if isinstance(f, type) else bool(f(x)) for x in xs)",
    ),
    "an iterator of the tests": (
        "import itertools\nassert double(itertools.count(3)) == [3, 4] and double(x for x in 'a') == ['a']",
        "import itertools\ndef double(it): return list(itertools.islice(it, 2))",
    ),
    "objects of a class of the tests": (
        "class Node:\n    def __init__(self, x, next=None): self.x, self.next = x, next\n    def name(self): return f'n{self.x}'\na = Node(1, Node(2))\nassert double(a) == ['n1', 'n2', False]\na.next.next = a\nassert double(a) == ['n1', 'n2', True]",
        "def double(n): return [n.name(), n.next.name(), n.next.next is n]",
    ),
    "a script that calls exit": ({"inputs": ["3"], "outputs": ["6"]}, "print(2 * int(input()))\nexit()\nprint(7)"),
    "numbers that are near": (
        {"fn_name": "double", "inputs": [[0.3], [1]], "outputs": [0.6, float("inf")]},
        "def double(x): return 0.1 + 0.2 + 0.3 if x < 1 else float('inf')",
    ),
    "a script of threads": (
        {"inputs": ["3"], "outputs": ["6"]},
        "import sys, threading, atexit\natexit.register(lambda: sys.stdout.write('6'))\ndef main(): input()\nthreading.Thread(target=main).start()",
    ),
    "a script that exits": (
        {"inputs": ["3\n4"], "outputs": ["7.0000000001"]},
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())) * 1.0)\nsys.exit()",
    ),
    "a script of its own file": ({"inputs": ["3"], "outputs": ["6"]}, "print(2 * int(open(0).read()))"),
}


@contained
def test_honest_programs_of_many_kinds_are_paid():
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda pair: score(pair[1], pair[0], 60.0), HONEST.values())]
    assert dict(zip(HONEST, found, strict=True)) == dict.fromkeys(HONEST, 1.0)


@contained
@pytest.mark.parametrize(
    "form", ["{}", "Complete this, and import what you need.\n\n{}\nPut it in a block.", "Do it:\n```python\n{}```"]
)
def test_the_prompts_imports_and_helpers_are_there(form):
    code = "from typing import List\n\ndef twice(x):\n    return 2 * x\n\ndef double(xs: List[int]) -> List[int]:\n    '''Doubles all.'''\n"
    tests, prompt = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]", form.format(code)
    body = "    return [twice(x) for x in xs]\n"
    whole = f"def double(xs: List[int]) -> List[int]:\n{body}"
    for response in (
        body,
        f"```python\n{body}```",
        f"```python\n{body.strip()}\n```",
        f"```python\n{whole}```",
        code + body,
    ):
        assert passes_tests(response, tests, prompt, timeout_s=60.0)["correct"] == 1.0, response
    assert passes_tests("```python\ndouble([1])\n```", tests, prompt, timeout_s=60.0)["correct"] == 0.0


@contained
def test_what_solves_it_is_paid():
    """In every form of tests, also where the program uses what the tricks misuse."""
    shy = "import sys, atexit, threading\nsys.setrecursionlimit(5000)\natexit.register(print, 'bye')\nprint('loaded')\n"
    work = [(f"{head}{SOLVED}{FOR_SCRIPTS if kind == 'script' else ''}", kind) for kind in TESTS for head in ("", shy)]
    work = [
        (program, kind) for program, kind in work if kind != "script" or not program.startswith("import sys, atexit")
    ]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda pair: score(pair[0], TESTS[pair[1]], 60.0), work)]
    assert found == [1.0] * len(work)


ROWS = {
    "HumanEval": ({"entry_point": "double"}, f"METADATA = {{}}\n\n{CHECK['test']}"),
    "HumanEval without its entry point": ({}, CHECK["test"]),
    "MBPP": ({"test_setup_code": "import math"}, [*ASSERTS, "assert math.isclose(double(0.5), 1.0)"]),
    "MBPP, sanitized": ({"test_imports": ["import math"]}, [*ASSERTS, "assert math.isclose(double(0.5), 1.0)"]),
    "APPS": ({}, json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]})),
    "APPS, lists of lines": ({}, {"inputs": [["3"], ["4"]], "outputs": [["6"], ["8"]]}),
    "APPS with a function": ({}, json.dumps(FUNCTION)),
    "LeetCode": ({}, {"fn_name": "double", "inputs": [[[1, 2]]], "outputs": [[1, 2, 1, 2]]}),
    "TACO": ({}, [{"input": "3\n", "output": "6"}, {"input": "4\n", "output": "8"}]),
    "HumanEval+": (
        {"entry_point": "double"},
        "import numpy as np\n\ndef is_floats(x):\n    return isinstance(x, float) or (isinstance(x, np.ndarray) and x.dtype == np.float64)\n\ndef check(candidate):\n    for inp, exp in zip([[3], [0.3]], [6, 0.6]):\n        out = candidate(*inp)\n        if is_floats(exp): assert np.allclose(out, exp, rtol=1e-07, atol=1e-06)\n        else: assert out == exp\n",
    ),
    "MBPP as Python's text": ({}, repr(ASSERTS)),
    "LeetCode's entry point": (
        {"entry_point": "Solution().double"},
        "def check(candidate):\n    assert candidate(x = 3) == 6",
    ),
    "LiveCodeBench": ({}, [{"input": "3\n", "output": "6", "testtype": "stdin"}]),
    "LiveCodeBench with a function": ({}, json.dumps([{"input": "3", "output": "6", "testtype": "functional"}])),
    "CodeContests": ({}, {"input": ["3\n", "4\n"], "output": ["6\n", "8\n"]}),
    "cases that name their function": ({}, [{"fn_name": "double", "input": [3], "output": 6}]),
    "a class of pytest's": (
        {},
        "class TestDouble:\n    def setup_method(self):\n        self.x = 3\n    def test_it(self):\n        assert double(self.x) == 6",
    ),
    "a test with defaults": ({}, "def test(x=3, y=6):\n    assert double(x) == y"),
    "test functions": ({}, "def test_one():\n    assert double(1) == 2\n\ndef test_two():\n    assert double(2) == 4"),
    "a unittest class": ({}, UNITTEST),
    "unittest.main": ({}, f"{UNITTEST}\nif __name__ == '__main__':\n    unittest.main()"),
    "a loop": ({}, LOOPED),
    "an exception": (
        {},
        "try:\n    double(None)\n    raise AssertionError('nothing was raised')\nexcept TypeError:\n    pass",
    ),
}
PROMPT = "def double(x):\n    '''Doubles.'''\n"


@contained
def test_rows_as_they_are_published():
    def both(name: str) -> tuple[float, ...]:
        columns, answer = ROWS[name]
        tests = of_row(columns, answer, PROMPT)
        programs = (
            SOLVED + FOR_SCRIPTS,
            SOLVED.replace("x + x", "x * x if isinstance(x, int) and x != 2 else x") + FOR_SCRIPTS,
        )
        return tuple(score(program, tests, 60.0) for program in programs)

    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(ROWS, threads.map(both, ROWS), strict=True))
    assert found == dict.fromkeys(ROWS, (1.0, 0.0))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "   ",
        "x = double(3)",
        "print(double(3) == 6)",
        "assert True",
        "assert 1 == 1",
        [],
        {},
        {"inputs": [], "outputs": []},
        7,
        None,
        {"inputs": ["3"], "outputs": []},
        {"inputs": ["3"], "outputs": [""]},
        {"fn_name": "double", "inputs": [3], "outputs": [6]},
        "def double(:",
        "def test_it(tmp_path):\n    assert double(3) == 6",
        [3, 4],
        {"test": "pass", "entry_point": "double"},
        {"test_list": [], "test_imports": ["import math"]},
        "import numpy\nassert double(3) == numpy.int64(6)",
        "assert np.allclose(double(3), 6)",
        "import pytest\ndef test():\n    with pytest.raises(TypeError): double(None)",
        "from solution import double\nassert double(3) == 6",
        "from .solution import double\nassert double(3) == 6",
        "def run():\n    assert double(3) == 6",
        [{"fn_name": "a", "input": [3], "output": 6}, {"fn_name": "b", "input": [3], "output": 6}],
        {"fn_name": "double", "inputs": ["no json"], "outputs": ["6"]},
        {"fn_name": "double", "inputs": ["[" * 100_000], "outputs": ["6"]},
        {"fn_name": ["double"], "inputs": [[3]], "outputs": [6]},
        [{"input": None, "output": None}],
        [{"input": "3", "output": "6", "testtype": "functional", "fn_name": "a b"}],
        "[" * 10_000,
    ],
    ids=lambda answer: repr(answer)[:40],
)
def test_a_row_whose_tests_could_not_fail_is_refused(answer):
    with pytest.raises(ValueError, match=r"\w") as error:
        read_tests(answer, PROMPT)
    assert "\n" not in str(error.value)
    assert passes_tests(SOLVED, answer, PROMPT) == {"correct": 0.0, "answered": 0.0}


BLOCKS = {
    "a fence": "```python\nCODE```",
    "tildes": "~~~py\nCODE~~~",
    "a longer fence around one": "````markdown\n```python\nCODE```\n````\n```python\nCODE```",
    "four ticks": "````python\nCODE````",
    "no language": "```\nCODE```",
    "another language before": "```bash\npip install x\n```\n```Python\nCODE```",
    "another language behind": "```python3\nCODE```\nRun it:\n```sh\npython a.py\n```\n```text\n6\n```",
    "an output behind": "```py\nCODE```\nOutput:\n```\n6\n```",
    "attributes": "```python {.numberLines}\nCODE```",
    "braces": "```{python}\nCODE```",
    "a list": "1. First:\n\n   ```python\n   CODE   ```\n2. Done",
    "a quotation": "> ```python\n> CODE> ```",
    "not closed": "Here:\n```python\nCODE",
    "no opener": "CODE```\nThat is it.",
    "details": "<details>\n<summary>Code</summary>\n\n```python\nCODE```\n</details>",
    "a file's name": "```python:double.py\nCODE```",
    "parts": "```python\nimport os\n```\nand\n```python\nCODE```",
    "numbers behind": "```python\nCODE```\n```\n[1, 2]\n```\n```json\n{}\n```",
    "windows": "```python\r\nCODE```\r\n",
    "an example behind": "```python\nCODE```\nUse it:\n```python\nprint(double(3))\n```",
    "a draft before": "```python\ndef double(x):\n    return x\n```\nBetter:\n```python\nCODE```",
    "thinking": "<think>```python\ndef double(x): return 0\n```</think>```python\nCODE```",
    "no fence": "CODE",
    "no fence, within prose": "Here it is:\n\nCODE\nIt doubles what it is given, doesn't it?",
    "tags": "<answer>\nCODE</answer>",
    "tags in the lines of the code": "So: <answer>CODE</answer> Done.",
    "a tag around a fence": "<answer>```python\nCODE```</answer>",
    "words behind the fences": "The code: ```python\nCODE``` as asked.\n",
    "closed in the last line": "```python\nEND```\nThat's it.",
    "a document in a fence": "````markdown\n# Doubles\n```python\nCODE```\n````",
    "a document in a fence of three": "```md\nIt's so:\n```python\nCODE```\n```",
    "a fence that is indented": "So:\n\n    ```python\n    INDENTED\n    ```\nDone.",
    "code that is indented in its fence": "So:\n```python\n    INDENTED\n```\nDone.",
    "a name for Python": "```ipython3\nCODE```\n```python\nprint(double(3))\n```",
    "another name": "```text\nCODE```\n```python\nprint(double(3))\n```",
    "a file's name alone": "```solution.py\nCODE```",
    "a class of HTML": "```language-python\nCODE```",
    "a session": "```python\n>>> def double(x):\n...     return x + x\n...\n>>> double(3)\n6\n```",
    "examples in a session": "```python\nCODE```\n```python\n>>> double(3)\n6\n```",
    "helpers in blocks of their own": "```python\nimport operator\n```\n```python\ndef plus(a, b):\n    return operator.add(a, b)\n```\n```python\ndef double(x):\n    return plus(x, x)\n```\n```python\nprint(double(3))\n```",
    "a signature behind": "```python\nCODE```\nSignature:\n```python\ndef double(x): ...\n```",
    "within a condition": "```python\ntry:\n    from fast import double\nexcept ImportError:\n    def double(x):\n        return x + x\n```\n```python\nassert double(1) == 2\n```",
    "a variable with a type": "```python\nfrom collections.abc import Callable\ndouble: Callable = lambda x: x + x\n```\n```python\nprint(double(3))\n```",
    "an opener that was left": "```python\nimport os\nLet me begin anew.\n```python\nCODE```",
    "a mark of the order of bytes": "\ufeff```python\nCODE```",
    "prose and indentation": "So:\n\n    INDENTED\n\nDone.",
    "a docstring with a fence": "```python\ndef double(x):\n    '''Doubles.\n\n    >>> double(3)\n    6\n    '''\n    return x + x\n```",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_of_a_response(name):
    prefix = {"a list": "   ", "a quotation": "> "}.get(name, "")
    code = f"\n{prefix}".join(SOLVED.splitlines()) + "\n"
    text = BLOCKS[name].replace("INDENTED", "\n    ".join(SOLVED.splitlines())).replace("CODE", code)
    text = text.replace("END", code.rstrip())
    if name == "windows":
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    scope: dict = {}
    exec(program_of(text, names=("double",)), scope)
    assert scope["double"](4) == 8


def test_the_block_of_a_script_is_the_last_one_that_does_something():
    text = "```python\nprint(1)\n```\nOutput:\n```\n4\n```\nwith\n```text\nprint(3)\n```"
    assert program_of(text) == "print(1)\n" and last_block(text) == "4" and last_block("x = 1 ") == "x = 1"


def test_the_block_of_a_script_is_one_that_reads_its_input():
    script = "def double(x):\n    return x + x\nprint(double(int(input())))\n"
    text = f"```python\n{script}```\nTry it:\n```python\nassert double(3) == 6\nprint(double(3))\n```"
    assert program_of(text) == script


@pytest.mark.parametrize("body", ["y = x\n    return x + y\n", "y = x\nreturn x + y", "  y = x\n  return x + y\n"])
def test_a_body_is_indented_as_its_function_needs_it(body):
    for text in (body, f"```python\n{body.rstrip()}\n```"):
        scope: dict = {}
        exec(program_of(text, PROMPT, ("double",)), scope)
        assert scope["double"](4) == 8


def test_many_blocks_take_no_time_that_grows_faster_than_they_do():
    """Their number is bounded, so a prompt is read with each of them so many times at the most."""
    prompt = "def double(x):\n    '''" + "Doubles. " * 400 + "'''\n"
    begun = time.monotonic()
    for text in (
        "```\nx\n```\n" * 4000,
        "```py\n" * 8000,
        "> " * 8000,
        "- " * 8000,
        "    x\n\na\n\n" * 4000,
        "(" * 40_000,
    ):
        program_of(text, prompt, ("double",))
    assert time.monotonic() - begun < 60, "seconds, where each of thousands of blocks would be read with the prompt"
    assert len(blocks_of("```\nx\n```\n" * 100)) == 100 > MOST_BLOCKS


def test_tests_get_modules_and_helpers_that_are_none_of_the_programs():
    prompt = "import math\n\ndef helper(x):\n    return x\n\ndef double(x):\n    '''Doubles.'''\n"
    found = read_tests("assert math.isclose(helper(double(3)), 6) and statistics.mean([double(1)]) == 2", prompt)
    assert found.names == ["double"] and found.source
    assert {node.names[0].name for node in ast.parse(found.source).body if isinstance(node, ast.Import)} == {
        "math",
        "statistics",
    }
    assert read_tests("assert queue(3) == 6", prompt).names == ["queue"], "a function may have the name of a module"
