"""Shared fixtures: tiny models of each family, made once per test run."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

from tests.preloaded import PYTHON_WITH_TRAINER
from tests.zygote import FOLDER, SELDOM, make_folder

hypothesis.settings.register_profile("tests", deadline=None)  # no test asserts on time
hypothesis.settings.load_profile("tests")
gc.disable()  # until all tests are imported: a fifth of that time
REPOSITORY = Path(__file__).resolve().parent.parent
TIMES = REPOSITORY / "tests" / "times.json"
"""Seconds of each file in an earlier run (--keep-times)."""
NEW_FILE_S = 30.0
"""For a file that has none there."""
SLOW = (
    *("e2e", "trainer", "rollout", "agents", "servers", "dialects", "routing", "sync", "models", "compression", "vp2o"),
    *("platform", "csrc"),
)
"""Folders whose files take minutes: servers, several processes, compilers. Their tests, and those marked `slow`, are not among
those of `tests/run.sh --fast`, but for the files of FAST."""
FAST = (
    "test_covering.py",
    "test_objective.py",
    "test_packing.py",
    "test_table.py",
    "test_refusals.py",
    "test_spec.py",
    "test_precision.py",
    "test_dialects.py",
    "test_conversation.py",
    "test_dpo_loss.py",
    "test_kl_control.py",
    "test_slots.py",
    "test_finished.py",
    "test_gates.py",
    "test_gate_wire.py",
    "test_http_client.py",
    "test_allocator.py",
    "test_importance.py",
    "test_sparsity.py",
)
"""Files of these folders that take seconds."""
LONG = (
    "algorithms/test_against_verl.py",
    "csrc/test_cuda_masked_log_softmax.py::test_planted_bugs_are_caught",
    "csrc/test_cuda_sink_attention.py::test_planted_bugs_are_caught",
    "csrc/test_sanitizers.py",
    "e2e/test_agent_runs.py::test_an_agent_of_ones_own",
    "e2e/test_agent_runs.py::test_two_leaders_train_on_conversations_and_resume",
    "e2e/test_ahead.py::test_servers_ahead_of_the_trainer[False]",
    "e2e/test_ahead.py::test_two_processes_give_up_an_update_and_learn_the_same_to_the_bit",
    "e2e/test_ask.py::test_eval_of_a_run_whose_server_dies",
    "e2e/test_certify.py::test_families_on_one_process_and_on_two_tensor_parallel_ranks",
    "e2e/test_certify.py::test_layouts_are_equal_to_one_process",
    "e2e/test_certify.py::test_trainer_and_engine_are_equal_in_bf16",
    "e2e/test_certify.py::test_without_identical_it_is_a_report",
    "e2e/test_fleet.py::test_a_run_outlives_its_servers[True]",
    "e2e/test_fleet.py::test_servers_behind_a_router",
    "e2e/test_groups_with_spread.py::test_groups_that_lie_on_two_leaders",
    "e2e/test_preference_commands.py::test_adapters_learn_preferences[dpo]",
    "e2e/test_preference_commands.py::test_ppo_by_adapters_leaves_all_else",
    "e2e/test_recovery.py::test_full_disk_is_one_clear_error_and_costs_no_checkpoint",
    "e2e/test_train.py::test_so_does_one_that_is_started_as_users_do",
    "e2e/test_train_vp2o.py::test_the_engine_keeps_its_weights_and_a_new_server_gets_the_newest",
    "e2e/test_two_leaders.py",
    "verifiers/test_human_eval.py::test_human_eval[False-164]",
    "verifiers/test_human_eval.py::test_human_eval[True-164]",
    "tools/test_mcp_conformance.py",
    "tasks/test_reasoning.py::test_one_response_never_changes_the_score_of_another[105]",
    "tasks/test_reasoning.py::test_the_little_that_any_text_is_paid_is_nothing[color_cube_rotation]",
    "tasks/test_reasoning.py::test_the_little_that_any_text_is_paid_is_nothing[palindrome_generation]",
    "tasks/test_verifiers_package.py::test_an_episode_can_do_no_harm_and_is_forgotten[True]",
    "models/test_adapters.py::test_adapters_of_any_start_are_read_or_refused",
    "models/test_adapters.py::test_peft_takes_all_of_a_folder_and_merges_it_as_we_do",
    "models/test_convert.py::test_upcycled_smollm2",
    "models/test_convert_memory.py::test_a_model_is_never_whole_in_memory[gpt_oss]",
    "platform/test_dry_run.py::test_all_that_is_compiled_ahead_compiles",
    "platform/test_dry_run.py::test_every_family_runs_on_a_pretended_h100",
    "rollout/test_agreement.py::test_fp32_heads_bring_both_sides_together",
    "rollout/test_agreement.py::test_trainer_agrees_on_sinks_windows_and_yarn[bf16-0.01-0.1]",
    "rollout/test_colocate.py::test_a_server_of_several_is_restarted_alone",
    "rollout/test_colocate.py::test_trainer_and_servers_take_turns",
    "rollout/test_prediction.py::test_a_prediction_below_the_resolution_of_bf16_routes",
    "rollout/test_prediction.py::test_what_a_family_samples_is_what_transformers_says[gpt_oss]",
    "rollout/test_prediction.py::test_what_a_family_samples_is_what_transformers_says[olmoe]",
    "rollout/test_replayed_gates.py::test_the_engines_gates_are_the_trainers[gpt_oss]",
    "rollout/test_replayed_gates.py::test_the_engines_gates_are_the_trainers[mixtral]",
    "rollout/test_replayed_gates.py::test_the_engines_gates_are_the_trainers[olmoe]",
    "rollout/test_quantized_server.py::test_sglang_serves_the_calibrated_model[mixtral-int4-keep_layers1]",
    "rollout/test_quantized_server.py::test_sglang_serves_the_calibrated_model[qwen3-int4-keep_layers2]",
    "routing/test_replay.py::test_families",
    "routing/test_replay.py::test_four_ranks",
    "scripts/test_upcycle.py::test_tokenizer_is_the_original",
    "sync/test_push.py::test_the_step_goes_on_when_a_server_is_killed_in_a_push",
    "sync/test_push_fp8.py::test_rounded_weights_are_served",
    "trainer/test_distillation.py::test_layouts_distill_as_one_process[advantage]",
    "trainer/test_features.py::test_layouts_distill_as_one_process",
    "trainer/test_fp8_training.py::test_layouts_agree_with_one_process",
    "compression/test_importance_layouts.py::test_importance_is_the_same_on_every_layout",
)
"""Files and tests that take long, of which another one looks at the same code on another family, precision or layout, or at
the same recovery elsewhere, and suites of others' that want `tools/setup.sh --suites`. `tests/run.sh --all` has them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of all tests, and of tests/gpu: pytest reads options before it comes to that folder."""
    parser.addoption(
        "--times", metavar="FILE", help="append a line for each test to FILE as it ends: seconds, outcome, name"
    )
    parser.addoption(
        "--keep-times",
        action="store_true",
        help="write the seconds of each file to tests/times.json, for later runs' order",
    )
    group = parser.getgroup("gpu")
    group.addoption("--on-cpu", action="store_true", help="run tests/gpu without a GPU where they can")
    group.addoption("--gpu-json", metavar="FILE", help="write outcomes and figures of tests/gpu to FILE")
    group.addoption(
        "--budget-s", type=float, metavar="N", help="begin no test of tests/gpu later than N s after the start"
    )
    group.addoption(
        "--references",
        metavar="FOLDER",
        default=str(REPOSITORY / "gpu-bundle" / "references"),
        help="what tests/gpu/references.py made on a CPU (default: gpu-bundle/references)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which -m "not slow" would take no test are not imported."""
    slow = collection_path.parent.name in SLOW and collection_path.name not in FAST
    return True if slow and "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long files first: the last worker that is still at one would be alone. Errors: UsageError for a name of LONG that is
    no test's."""
    seconds = json.loads(TIMES.read_text())
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), NEW_FILE_S))
    unknown, files = set(LONG), set()
    for item in items:
        if item.path.parent.name in SLOW and item.path.name not in FAST:
            item.add_marker("slow")
        name = item.nodeid.removeprefix("tests/")
        file = name.partition("::")[0]
        files.add(file)
        if found := {name, name.partition("[")[0], file}.intersection(LONG):
            item.add_marker("long")
            unknown -= found
    if not any("::" in argument for argument in config.args):  # files are whole
        unknown = {name for name in unknown if name.partition("::")[0] in files}
        if unknown:
            raise pytest.UsageError(f"tests/conftest.py: LONG has {', '.join(sorted(unknown))}, which is no test")


def _file(test: str) -> str:
    """Path below tests/ of a test's file."""
    return test.partition("::")[0].removeprefix("tests/")


class _Ends:
    """Says at once which test has failed, as a suite that is ended by a limit says nothing at its end; keeps times."""

    def __init__(self, times: str | None, keep: bool) -> None:
        self._times, self._keep = times, keep
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}  # of tests that have not passed in one of set-up, call and teardown
        self._of_files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        self._of_files[_file(report.nodeid)] += report.duration
        if not report.passed:
            self._outcomes[report.nodeid] = report.outcome
        if report.failed:
            print(f"\n{report.outcome.upper()} {report.nodeid} ({report.when})", flush=True)
        if report.when == "teardown" and self._times:
            with open(self._times, "a") as file:
                outcome = self._outcomes.get(report.nodeid, "passed")
                file.write(f"{self._seconds.pop(report.nodeid):8.2f} {outcome} {report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        if self._keep:
            found = json.loads(TIMES.read_text()) | {file: round(s, 1) for file, s in self._of_files.items()}
            files = {file: found[file] for file in sorted(found) if (TIMES.parent / file).exists()}
            TIMES.write_text(json.dumps(files, indent=1) + "\n")


def pytest_collection_finish() -> None:
    """What all tests have imported is not looked at again whenever garbage is collected."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)


def pytest_configure(config: pytest.Config) -> None:
    """Reports come together in the process that the user has started, with which what others are forked from ends too."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Ends(config.getoption("--times"), config.getoption("--keep-times")))
        os.environ[FOLDER] = make_folder()
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from tests import forked_servers  # which imports what a process that only distributes tests does without

        forked_servers.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list) -> None:
    """Workers are forked, unless --tx has named a Python for them."""
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.quote(PYTHON_WITH_TRAINER)


@pytest.fixture(scope="session")
def _threads() -> list[int]:
    """How many were left when trainers were freed last: some are others', and to look for trainers takes seconds."""
    return [50]


@pytest.fixture(autouse=True)
def _ends_groups(_threads):
    """A process of tests that has had many trainers would be busy with their groups alone (`ranks.end_layout`)."""
    yield
    if len(os.listdir("/proc/self/task")) > _threads[0] + 100:
        from ranks import free_trainers

        free_trainers()
        _threads[0] = len(os.listdir("/proc/self/task"))


@pytest.fixture
def rng():
    """numpy's generator of a fresh seed, which is shown where the test fails."""
    import numpy as np

    entropy = np.random.SeedSequence().entropy
    print("entropy", entropy)
    return np.random.default_rng(entropy)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory):
    """tiny_model("qwen3_moe", "--layers", "4") -> folder of a tiny random model, made once for the same arguments."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*arguments: str) -> Path:
        from tools.make_tiny_model import main  # transformers, which most files of tests do without

        if arguments not in made:
            out = tmp_path_factory.mktemp("models") / "-".join(a.strip("-") for a in arguments)
            assert main([arguments[0], str(out), *arguments[1:]]) == 0
            made[arguments] = out
        return made[arguments]

    return make
