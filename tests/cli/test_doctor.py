"""megatron-rl doctor: what it finds, and that it never fails itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_rl_plugin.installed import code

from megatron_rl.run import doctor
from megatron_rl.sandbox import bubblewrap, cgroup, isolated
from tests.preloaded import PYTHON_WITH_TRAINER


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """packages({"apex/__init__.py": "code"}, apex="0.1") puts modules and their metadata first on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(files: dict[str, str], **versions: str) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        for name, version in versions.items():
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    yield make
    made = {path.name for path in tmp_path.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in made]:
        del sys.modules[name]


def found_of(part: str) -> doctor.Finding:
    [check] = [check for check in doctor.CHECKS if check.part == part]
    return check.finding()


BROKEN = "raise RuntimeError('must not be imported')"


def test_apex_absent():
    assert found_of("NVIDIA Apex").state == "missing"


def test_the_unrelated_apex_of_pypi_is_told_apart(packages):
    packages({"apex/__init__.py": BROKEN, "apex/views.py": ""}, apex="0.9.10.dev0")
    finding = found_of("NVIDIA Apex")
    assert finding.state == "warning" and "0.9.10.dev0" in finding.found and "not NVIDIA's" in finding.note


@pytest.mark.parametrize(("extra", "state"), [({"amp_C.py": BROKEN}, "ok"), ({}, "warning")])
def test_nvidia_apex_with_and_without_its_extensions(packages, extra, state):
    packages({"apex/__init__.py": BROKEN, "apex/normalization/__init__.py": "", **extra}, apex="0.1")
    finding = found_of("NVIDIA Apex")
    assert finding.state == state and "0.1" in finding.found


def test_without_transformer_engine_apex_needs_its_extensions_on_a_gpu(packages, monkeypatch):
    """Its Adam is then Megatron's, and refuses to work."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    packages({"apex/__init__.py": BROKEN, "apex/normalization/__init__.py": ""}, apex="0.1")
    assert found_of("NVIDIA Apex").state == "error"
    packages({"transformer_engine/__init__.py": ""})
    assert found_of("NVIDIA Apex").state == "warning"


def test_installed_parts_are_named_with_their_versions(packages, monkeypatch):
    packages({"deep_ep/__init__.py": BROKEN}, deep_ep="1.2")
    assert found_of("DeepEP") == doctor.Finding("DeepEP", "ok", "1.2")
    files = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch.py": ""}
    packages(files, transformer_engine="2.9.0")
    found = found_of("Transformer Engine")
    assert found.state == "missing" and found.found == "2.9.0, not used", "there is no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert found_of("Transformer Engine") == doctor.Finding("Transformer Engine", "ok", "2.9.0")


def test_flash_attention_4_is_taken_where_the_gpu_is_one_for_it_and_an_error_where_broken(packages, monkeypatch):
    monkeypatch.setattr("megatron_rl.ops.flash._is_there", lambda name: name == "FA4")
    packages({f"flash_attn/{name}.py": "" for name in ("__init__", "cute/__init__", "cute/interface")})
    assert found_of("flash attention").note == "", "there is no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, taken in (((9, 0), "FA4"), ((8, 0), "torch")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda capability=capability: capability)
        found = found_of("flash attention")
        assert (found.state, found.found) == ("ok", "torch's own (FlashAttention 2), FA4")
        assert found.note == f"model.flash_attention: auto uses {taken} here, in bf16"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    packages({"flash_attn/cute/interface.py": BROKEN})
    sys.modules.pop("flash_attn.cute.interface")
    found = found_of("flash attention")
    assert found.state == "error" and "must not be imported; set model.flash_attention: torch, which" in found.note


def test_transformer_engine_on_a_gpu_is_a_cost_where_absent_and_an_error_where_broken(packages, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    absent = found_of("Transformer Engine")
    assert absent.state == "missing" and "tools/setup.sh --gpu" in absent.note
    packages({"transformer_engine/__init__.py": BROKEN}, transformer_engine="2.9.0")
    broken = found_of("Transformer Engine")
    assert broken.state == "error" and "must not be imported" in broken.note and "--gpu --force" in broken.note


@pytest.mark.parametrize(
    ("capability", "built", "state", "words"),
    [
        (None, False, "ok", "only"),
        (None, True, "ok", "and CUDA"),
        ((9, 0), True, "ok", "and CUDA"),
        ((9, 0), False, "error", "tools/setup.sh --gpu installs nvcc"),
        ((7, 5), True, "error", "this GPU has 7.5"),
    ],
)
def test_kernels_that_a_run_would_be_refused_for_are_an_error(capability, built, state, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("megatron_rl.ops.extensions.have_cuda", lambda: built)
    finding = found_of("megatron_rl's kernels")
    assert finding.state == state and words in finding.found + finding.note


def test_no_engine_is_an_error_as_the_default_config_starts_one():
    finding = doctor.Check("SGLang", lambda: doctor._sglang((None, None))).finding()
    assert finding.state == "error" and "rollout.addresses" in finding.note
    assert doctor.Check("SGLang", lambda: doctor._sglang((Path("python"), None))).finding().state == "error"


def test_a_missing_package_is_an_error_only_if_nothing_runs_without_it():
    assert doctor._package("no-such-package", "x", "error").finding().state == "error"
    finding = doctor._package("no-such-package", "no y: run tools/setup.sh").finding()
    assert finding.state == "missing" and finding.note == "no y: run tools/setup.sh"


def test_the_sandbox_is_probed(monkeypatch):
    monkeypatch.setattr(bubblewrap, "problem", lambda: "no user namespaces; do this")
    found = found_of("sandbox")
    assert (found.part, found.state) == ("sandbox", "missing") and found.note == "no user namespaces; do this"


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [("v1", "ok", "the kernel limits"), ("v2", "ok", "the kernel limits"), ("", "missing", "ten times per second")],
)
def test_control_groups_are_tried(monkeypatch, version, state, words):
    monkeypatch.setattr(cgroup, "version", lambda: version)
    found = found_of("control groups")
    assert (found.state, found.found) == (state, version or "this user cannot create any") and words in found.note


@pytest.mark.parametrize(
    ("user", "drops", "found"),
    [
        (0, True, "seccomp, as nobody"),
        (0, False, "seccomp, without capabilities"),
        (1000, True, "seccomp, as this user"),
    ],
)
def test_how_scorers_are_isolated(monkeypatch, user, drops, found):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: user)
    monkeypatch.setattr(isolated, "drops_user", lambda: drops)
    monkeypatch.setattr(isolated, "problem", lambda: "")
    assert found_of("third-party scorers").found == found and found_of("third-party scorers").state == "ok"
    monkeypatch.setattr(isolated, "problem", lambda: "do this")
    assert found_of("third-party scorers") == doctor.Finding(
        "third-party scorers", "missing", "reasoning_gym tasks are refused", "do this"
    )


def test_a_check_that_fails_becomes_a_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("broken package")

    monkeypatch.setattr(doctor, "_start_engine_probe", lambda: (None, None))
    for name in ("version_of", "_folder_of", "_has_module"):
        monkeypatch.setattr(doctor, name, fail)
    findings = doctor.examine()
    assert sum(f.state == "warning" and f.found == "RuntimeError: broken package" for f in findings) >= 8
    assert any(f.part == "SGLang" and "rollout.addresses" in f.note for f in findings)


FOUND = {"sglang": "1", "torch": None, "transformers": None, "problem": "ImportError: x"}


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        ("import sys; sys.exit(3)", "error", "ended its Python with status 3"),
        (f"print('{json.dumps(FOUND | {'code': code()})}')", "error", "cannot be imported (ImportError: x)"),
        (f"print('{json.dumps(FOUND | {'code': None})}')", "error", "lacks megatron-rl-sglang: run tools/setup.sh"),
        ("import time; time.sleep(600)", "warning", "took longer"),
    ],
)
def test_a_broken_engine_environment_is_described(monkeypatch, code, state, words):
    monkeypatch.setattr(doctor, "ENGINE_TIMEOUT_S", 1.0 if "sleep" in code else 60.0)
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    finding = doctor.Check("SGLang", lambda: doctor._sglang((Path("python"), process))).finding()
    assert finding.state == state and words in finding.found + finding.note
    assert process.poll() is not None


def test_precision_regimes_are_those_that_a_run_is_refused_by(monkeypatch):
    from megatron_rl.models import precision

    monkeypatch.setattr(precision, "this_machine", lambda: precision.Machine(None, None, "0.47.0", "13.0"))
    trainer, rollout = found_of("trainer precision"), found_of("rollout precision")
    assert trainer.part == "trainer precision" and trainer.state == "missing"
    assert trainer.found == "bf16, fp32, fp8_tensorwise (simulated), fp8_blockwise (simulated)"
    assert "mxfp8 needs Transformer Engine and a GPU of compute capability 10.0 (Blackwell)" in trainer.note
    assert "fp8_delayed needs" in trainer.note and "simulated: inputs and weights are rounded" in trainer.note
    assert (rollout.state, rollout.found) == (
        "ok",
        "bf16, fp32, fp8 (simulated)",
    ) and "products are bf16" in rollout.note
    monkeypatch.setattr(precision, "this_machine", lambda: precision.Machine((10, 0), "2.20.2", "0.47.0", "13.0"))
    everything = doctor.Finding("trainer precision", "ok", ", ".join(precision.TRAIN))
    assert found_of("trainer precision") == everything


@pytest.mark.slow
def test_command_prints_json_and_a_table():
    command = [PYTHON_WITH_TRAINER, "-c", "import sys; from megatron_rl.cli import main; sys.exit(main())", "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    findings = {f["part"]: f for f in json.loads(done.stdout)}
    assert findings["megatron-core"]["found"] == importlib.metadata.version("megatron-core")
    assert importlib.metadata.version("torch") in findings["torch and GPUs"]["found"]
    assert findings["SGLang"]["state"] == "ok", findings["SGLang"]
    assert "bf16, fp32, fp8" in findings["rollout precision"]["found"]
    assert all(f["note"] for f in findings.values() if f["state"] != "ok")


def test_table_shows_every_finding_and_the_status(capsys, monkeypatch):
    findings = [doctor.Finding("a part", "ok", "1.0 [x]"), doctor.Finding("b part", "error", "gone", "nothing works")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert doctor.doctor() == 1
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("a part", "1.0 [x]", "error", "nothing works"))
