"""The record of a conversation: tokens, masks, log-probs, kept sets, routes, features and weight versions over turns."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.agents.conversation import Conversation
from megatron_rl.data.engine_routes import EngineRoutes
from megatron_rl.data.packing import IGNORED, Layout, pack
from megatron_rl.data.sequence import RouterFeatures
from megatron_rl.data.trajectory import WeightSpan, load_trajectories, save_trajectories
from megatron_rl.servers.reply import Reply

SHAPE = EngineRoutes(layers=3, moe_layers=(1, 2), experts=8, topk=2)


def random_conversation(rng: np.random.Generator, versions: list[str]) -> tuple[Conversation, list[np.ndarray]]:
    """A conversation of one reply for each version, and its pieces: prompt, replies and observations in turn."""
    prompt = rng.integers(0, 1000, rng.integers(1, 9))
    talk, pieces = Conversation(prompt.tolist()), [prompt]
    for number, version in enumerate(versions):
        m = int(rng.integers(1, 9))
        start = talk.known_routes()
        rows = len(talk.context) + m - 1 - start
        reply = Reply(
            rng.integers(0, 1000, m).astype(np.int32),
            {"loss_mask": np.ones(m, bool), "rollout_log_probs": -rng.random(m).astype(np.float32)},
            "stop",
            [WeightSpan(version, 0, m)],
            kept=[rng.integers(0, 1000, rng.integers(1, 4)).astype(np.int32) for _ in range(m)],
            routes=np.argsort(rng.random((rows, 2, 8)), -1)[..., :2].astype(np.uint8),
            routes_start=start,
            features=RouterFeatures(
                torch.arange(m, dtype=torch.int32)[::2], torch.rand(-(-m // 2), 2, 4), torch.rand(-(-m // 2), 2, 8)
            ),
        )
        talk.add_reply(reply)
        pieces.append(reply.tokens)
        if number < len(versions) - 1:
            observation = rng.integers(0, 1000, rng.integers(1, 9))
            talk.add_observation(observation.tolist())
            pieces.append(observation)
    talk.finish_reason = "stop"
    return talk, pieces


def trajectory(talk: Conversation):
    return talk.trajectory(SHAPE, prompt_id="a", group_id=0)


def test_a_trajectory_is_its_pieces_and_only_replies_train():
    rng = np.random.default_rng()
    for _ in range(50):
        talk, pieces = random_conversation(rng, ["5"] * int(rng.integers(1, 5)))
        t = trajectory(talk)
        assert t.tokens.tolist() == np.concatenate(pieces).tolist() and t.prompt_length == len(pieces[0])
        masks = [np.full(len(piece), i % 2 == 0) for i, piece in enumerate(pieces[1:])]
        assert t["loss_mask"].tolist() == np.concatenate(masks).tolist()
        said = np.concatenate([reply.fields["rollout_log_probs"] for reply in talk.replies])
        assert (t["rollout_log_probs"][t["loss_mask"]] == said).all() and not t["rollout_log_probs"][
            ~t["loss_mask"]
        ].any()
        kept = [ids.tolist() for reply in talk.replies for ids in reply.kept]
        assert [ids.tolist() for ids, counted in zip(t.kept, t["loss_mask"], strict=True) if counted] == kept
        assert all(not len(ids) for ids, counted in zip(t.kept, t["loss_mask"], strict=True) if not counted)
        assert [(s.version, s.start, s.end) for s in t.weight_spans] == [("5", 0, t.response_length)]
        assert [turn.role for turn in t.turns] == ["assistant", "tool"] * (len(talk.replies) - 1) + ["assistant"]


def test_routes_are_joined_and_those_of_older_weights_forgotten():
    rng = np.random.default_rng()
    talk, _ = random_conversation(
        rng, ["5", "5", "5", "6"]
    )  # the push has met the last reply: nobody knew of it before
    t = trajectory(talk)
    assert t.routes.shape == (len(t.tokens) - 1, 2, 2)
    old, new = sum(len(reply.routes) for reply in talk.replies[:3]), talk.replies[3].routes
    assert (t.routes[:old] == SHAPE.shape.empty(1)[0]).all() and (t.routes[old:] == new).all()
    assert [s.version for s in t.weight_spans] == ["5", "6"] and t.weight_spans[1].start == talk.turns[6].start


def test_after_a_push_the_next_reply_brings_the_routes_of_all_turns():
    """Against an engine that keeps a row for each token, by the weights that it has: a push flushes them all.

    Only a push that meets the last reply leaves rows unknown, those of the turns before it; and no row ever is of others.
    """
    rng, lost = np.random.default_rng(), 0
    for _ in range(200):
        turns = int(rng.integers(1, 7))
        talk, version, known, met = Conversation([1] * int(rng.integers(1, 9))), 0, 0, False
        tables = np.argsort(rng.random((2 * turns + 1, 120, 2, 8)), -1)[..., :2].astype(np.uint8)  # by version
        for turn in range(turns):
            before, within = rng.random(2) < 0.3  # a push before the request, or while it is answered
            version += int(before)
            known, met = talk.known_routes(str(version)), bool(within)
            version += int(within)
            m = int(rng.integers(1, 9))
            rows = slice(known, len(talk.context) + m - 1)
            fields = {"loss_mask": np.ones(m, bool), "rollout_log_probs": np.zeros(m, np.float32)}
            spans, routes = [WeightSpan(str(version), 0, m)], tables[version, rows]
            talk.add_reply(Reply(np.zeros(m, np.int32), fields, "stop", spans, routes=routes, routes_start=known))
            if turn < turns - 1:
                talk.add_observation([2] * int(rng.integers(1, 9)))
        t, first = trajectory(talk), known if met else 0  # met by a push that nobody knew of when it was asked for
        lost += first > 0
        assert len(t.routes) == len(t.tokens) - 1
        assert (t.routes[:first] == SHAPE.shape.empty(1)[0]).all()
        assert (t.routes[first:] == tables[version, first : len(t.routes)]).all()
    assert 0 < lost < 150


def test_rows_travel_once_while_the_weights_stay():
    """Rows that the engine has sent are not sent again; after a push that nobody knew of all are, once."""
    rng = np.random.default_rng()
    talk, _ = random_conversation(rng, ["5"] * 4)
    assert sum(len(reply.routes) for reply in talk.replies) == len(talk.context) - 1 == talk.known_routes("5")
    assert talk.known_routes("6") == 0 and talk.known_routes() == len(talk.context) - 1
    talk, _ = random_conversation(rng, ["5", "6", "6", "6"])
    starts = [reply.routes_start for reply in talk.replies]
    assert starts[1] == len(talk.prompt) + talk.turns[0].end - 1 and starts[0] == starts[2] == 0 < starts[3]
    assert Conversation([1, 2]).known_routes() == Conversation([1, 2]).known_routes("5") == 0


def test_features_are_counted_over_the_whole_response():
    talk, _ = random_conversation(np.random.default_rng(), ["5", "5", "5"])
    t = trajectory(talk)
    starts = [turn.start for turn in talk.turns if turn.role == "assistant"]
    expected = [
        start + p for start, reply in zip(starts, talk.replies, strict=True) for p in reply.features.positions.tolist()
    ]
    assert t.features.positions.tolist() == expected
    assert torch.equal(t.features.logits, torch.cat([reply.features.logits for reply in talk.replies]))


def test_a_reply_that_is_cut_is_what_was_sampled_so_far():
    rng = np.random.default_rng()
    for _ in range(20):
        talk, _ = random_conversation(rng, ["5", "6"])
        reply = talk.replies[1]
        reply.weight_spans = [WeightSpan("5", 0, 1), WeightSpan("6", 1, len(reply.tokens))]
        count = int(rng.integers(1, len(reply.tokens) + 1))
        cut = reply.first(count)
        assert (
            cut.tokens.tolist() == reply.tokens[:count].tolist()
            and len(cut.kept) == count
            and cut.finish_reason == "stop"
        )
        assert (cut.fields["rollout_log_probs"] == reply.fields["rollout_log_probs"][:count]).all()
        assert (
            len(cut.routes) == len(reply.routes) - (len(reply.tokens) - count)
            and (cut.routes == reply.routes[: len(cut.routes)]).all()
        )
        assert cut.features.positions.tolist() == [p for p in reply.features.positions.tolist() if p < count]
        assert (
            cut.weight_spans[-1].end == count and [s.version for s in cut.weight_spans] == ["5", "6"][: min(count, 2)]
        )


def test_an_observation_that_no_reply_follows_is_dropped():
    talk, pieces = random_conversation(np.random.default_rng(), ["5", "5"])
    talk.add_observation([1, 2, 3])
    talk.drop_open_observation()
    talk.drop_open_observation()
    assert trajectory(talk).tokens.tolist() == np.concatenate(pieces).tolist()


def test_a_conversation_without_a_reply_is_its_prompt():
    talk = Conversation([1, 2, 3])
    t = talk.trajectory(SHAPE, prompt_id="a", group_id=0)
    assert t.tokens.tolist() == [1, 2, 3] and t.response_length == 0 and t.routes is None and t.weight_spans == []
    assert len(pack([t], [0], Layout()).label_rows) == 0


def test_observations_cost_no_row_of_the_head():
    talk, _ = random_conversation(np.random.default_rng(), ["5", "5", "5"])
    t = trajectory(talk)
    t.routes = t.features = None
    batch = pack([t], [0], Layout())
    assert len(batch.label_rows) == t["loss_mask"].sum() < t.response_length
    counted = np.flatnonzero(t["loss_mask"]) + t.prompt_length
    assert batch.labels[batch.label_rows].tolist() == t.tokens[counted].tolist()
    assert (batch.labels != IGNORED).sum() == len(counted) and batch.sequence_lengths.tolist() == [len(counted)]


def test_a_record_on_disk_keeps_turns_and_masks(tmp_path):
    talk, _ = random_conversation(np.random.default_rng(), ["5", "6"])
    t = trajectory(talk)
    t.turns[0].calls, t.turns[1].seconds, t.masked, t.finish_reason = ["f"], 0.25, True, "failure"
    save_trajectories(tmp_path / "a.npz", [t])
    [back] = load_trajectories(tmp_path / "a.npz")
    assert back.turns == t.turns and back.masked and back.finish_reason == "failure"
    assert (back.tokens == t.tokens).all() and (back.routes == t.routes).all()
