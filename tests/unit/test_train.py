"""Training: answers that go on, the same run from the same seed, the same run after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft import LLM
from foredraft.cli.main import main as command
from foredraft.errors import ConfigError, DataError, ModelLoadError
from foredraft.heads.checkpoint import load_head, load_medusa, make_head
from foredraft.heads.draft_model import KeptLayers, load_draft
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.output_law import LogitShape, OutputLaw
from foredraft.heads.shape import shape_for
from foredraft.model.loader import Target, prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.train.begin import begin_from_target, choose_words
from foredraft.train.features import Batch, FeatureReader
from foredraft.train.learner import DraftLearner, HeadLearner
from foredraft.train.run import METHODS, Run, train
from foredraft.train.texts import Text, answer, answered, batches, read_prompts
from foredraft.train.trainer import TrainConfig, Trainer
from foredraft.train.unroll import Teacher
from tests.folders import CONTEXT, VOCAB, make_folder, make_model, make_tokenizer
from tests.tiny import family_model, warnings_logged

PROMPTS = [f"one two {word} three" for word in ("red", "blue", "fox", "bird", "hill", "tree")]
QUICK = TrainConfig(
    learning_rate=3e-3,
    num_epochs=3,
    batch_tokens=96,
    max_len=64,
    num_levels=3,
    num_held_out=2,
    checkpoint_minutes=100.0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target() -> Target:
    return prepare_target("tiny", make_model(), make_tokenizer(), CONTEXT, packs=False)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return some_texts()


def some_texts() -> list[Text]:
    rng = np.random.default_rng(1)
    sizes = rng.integers(8, 40, 14).tolist()
    return [Text(rng.integers(5, VOCAB, size), 4) for size in sizes]


def new_head(target: Target, kind: str = "eagle3", num_words: int | None = 64) -> Any:
    torch.manual_seed(0)
    if kind == "draft-model":
        return DraftLearner(KeptLayers(target, [1], torch.arange(64) * 5), target, False)
    num_words = num_words if kind in ("eagle3", "medusa") else None
    shape = shape_for(target.model.config, kind, num_words, num_levels=3)
    head = MedusaHead(shape) if kind == "medusa" else make_head(shape)
    if num_words is not None:
        head.d2t.copy_(torch.arange(num_words) * 4)
    begin_from_target(head, target)
    return HeadLearner(head, target)


# ------------------------------------------------------------------------------------- data


def data(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_come_in_three_forms(tmp_path: Path) -> None:
    path = data(
        tmp_path,
        '{"prompt": "one"}',
        "",
        '{"text": "two"}',
        '{"messages": [{"role": "user", "content": "three"}]}',
    )
    assert read_prompts(path) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1 is no JSON"),
        (['{"prompt": "one"}', '{"prompt": ""}'], "line 2 holds no text"),
        (['{"answer": "one"}'], "line 1 holds no text; each line needs 'prompt', 'text' or"),
        (["3"], "line 1 holds no text"),
        ([""], "holds no line; there is nothing to learn from"),
    ],
)
def test_bad_data_is_said_by_line(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(data(tmp_path, *lines))
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_answers_are_the_targets_and_go_on_where_they_were(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "answers.jsonl"
    calls = 0

    def stop_early() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1

    with LLM(str(folder), max_num_requests=2, kv_cache_gb=0.1) as llm:
        first = answer(llm, PROMPTS, path, 12, 0, lambda num, tokens: None, stop_early)
        assert 0 < len(first) < len(PROMPTS)
        with path.open("a", encoding="utf-8") as file:
            file.write('{"number": 5, "prompt_ids": [1, 2')  # it was killed in mid-line
        told: list[tuple[int, int]] = []
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        done = answer(llm, PROMPTS, path, 12, 0, lambda num, tokens: told.append((num, tokens)))
        assert sorted(done) == list(range(len(PROMPTS)))
        assert told[-1][0] == len(PROMPTS) and len(told) == len(PROMPTS) - len(first)
        for number, text in done.items():
            messages = [{"role": "user", "content": PROMPTS[number]}]
            sampling = SamplingParams(
                max_tokens=12, temperature=0.0 if number % 2 else 0.8, seed=number
            )
            output = llm.generate(messages, sampling, SpeculationParams("none"))[0]
            assert text.token_ids[text.num_prompt :].tolist() == list(output.token_ids)
        # One that leaves no room for an answer is passed over, a short answer is not.
        size = len(llm.encode([{"role": "user", "content": PROMPTS[0]}]))
        told.clear()
        some = [PROMPTS[0], "word " * 60, PROMPTS[0]]
        cut = answer(
            llm,
            some,
            tmp_path / "cut",
            20,
            0,
            lambda num, _: told.append((num, 0)),
            max_len=size + 16,
        )
        assert sorted(cut) == [0, 2] and told[-1][0] == 3
        assert all(len(text.token_ids) <= size + 16 for text in cut.values())
        assert not answer(llm, some, tmp_path / "none", 20, 0, lambda *_: None, max_len=size + 15)
    again = answered(path)
    assert all((again[n].token_ids == done[n].token_ids).all() for n in done)


def test_batches_hold_every_text_once_within_their_size(texts: list[Text]) -> None:
    for seed in range(5):
        found = batches(texts, 96, 32, np.random.default_rng(seed))
        assert sum(map(len, found)) == len(texts)
        for batch in found:
            longest = max(len(text.token_ids) for text in batch)
            assert longest <= 32 and (longest * len(batch) <= 96 or len(batch) == 1)
    one, other = (batches(texts, 96, 32, np.random.default_rng(s)) for s in (0, 0))
    assert [len(batch) for batch in one] == [len(batch) for batch in other]


def test_words_are_those_of_answers() -> None:
    texts = [Text(np.array([9, 9, 3, 7, 7, 5]), 2), Text(np.array([8, 7, 5, 5, 5, 2]), 1)]
    offsets = choose_words(texts, 3, 12)
    assert (offsets + torch.arange(3)).tolist() == [3, 5, 7] or (
        offsets + torch.arange(3)
    ).tolist() == [2, 5, 7]
    whole = choose_words(texts, 12, 12)
    assert (whole + torch.arange(12)).tolist() == list(range(12))


# --------------------------------------------------------------------------------- features


def test_features_are_transformers_hidden_states(target: Target, texts: list[Text]) -> None:
    plain = make_model()
    batch = FeatureReader(target, (0, 1, 2), 64).read(texts[:4])
    for row, text in enumerate(texts[:4]):
        ids = torch.from_numpy(text.token_ids)[None]
        with torch.no_grad():
            out = plain(ids, output_hidden_states=True)
        size = len(text.token_ids)
        joined = torch.cat([out.hidden_states[layer][0] for layer in (0, 1, 2)], dim=-1)
        torch.testing.assert_close(batch.features[row, :size], joined, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            batch.final[row, :size], out.hidden_states[-1][0], rtol=1e-4, atol=1e-5
        )
        assert batch.is_real[row].sum() == size and not batch.features[row, size:].any()
        assert batch.is_answer[row].nonzero().flatten().tolist() == list(range(4, size))


# --------------------------------------------------------------------------------- features kept


def reader_of(target: Target, folder: Path, most: int = 10**9) -> FeatureReader:
    return FeatureReader(target, (1, 2), 64, keep_in=folder, keep_bytes=most, num_tokens=10**6)


def test_features_are_computed_once_and_read_again(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FeatureReader(target, (1, 2), 64).read(texts[:6])
    reader = reader_of(target, tmp_path)
    first = reader.read(texts[:6])
    monkeypatch.setattr(reader._runner, "forward", None)  # whoever computes now fails
    second = reader.read(texts[5:0:-1])
    for name in ("features", "final"):
        torch.testing.assert_close(
            getattr(first, name), getattr(plain, name).bfloat16().float(), rtol=0, atol=0
        )
        size = getattr(second, name).shape[1]
        for row in range(5):
            assert torch.equal(getattr(second, name)[row], getattr(first, name)[5 - row, :size])
    assert reader.store is not None
    num_rows = sum(len(text.token_ids) for text in texts[:6])
    size = int(target.model.config.hidden_size) * len({1, 2, target.model.config.num_hidden_layers})
    assert reader.store.num_bytes == num_rows * size * 2
    reader.store.close()
    # Another run takes over what is whole: the last line is cut off, as by a kill.
    more = reader_of(target, tmp_path)
    more.read(texts[6:9])
    assert more.store is not None
    more.store.close()
    (index,) = tmp_path.glob("*/index")
    index.write_text(index.read_text()[:-9])
    again = reader_of(target, tmp_path)
    assert again.store is not None and again.store.num_bytes == reader.store.num_bytes
    assert all(again.store.get(text) is not None for text in texts[:6])
    assert again.store.get(texts[7]) is None
    again.store.close()
    # Other features have a folder of their own.
    other = FeatureReader(target, (0,), 64, keep_in=tmp_path, keep_bytes=10**9, num_tokens=10**6)
    assert other.store is not None and other.store.num_bytes == 0
    other.store.remove()
    assert reader_of(target, tmp_path).store.num_bytes == num_rows * size * 2  # type: ignore


def test_heads_of_all_kinds_share_features(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, config = tmp_path / "kept", dataclasses.replace(QUICK, num_epochs=1)
    options: dict[str, Any] = {"record": None, "features": kept}
    first = Trainer(new_head(target), texts, config, tmp_path / "a", **options)
    # While one writes another reads what there was, which is nothing, and writes nothing.
    second = Trainer(new_head(target), texts, config, tmp_path / "b", **options)
    torch.manual_seed(0)  # both were made before either ran
    first.run(lambda now: None)
    (rows,) = kept.glob("*/rows")
    size = rows.stat().st_size
    torch.manual_seed(0)
    second.run(lambda now: None)
    assert rows.stat().st_size == size > 0
    heads = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert first._reader.store is not None
    first._reader.store.close()
    for kind in ("eagle", "medusa", "mtp", "draft-model"):
        trainer = Trainer(new_head(target, kind), texts, config, tmp_path / kind, **options)
        monkeypatch.setattr(trainer._reader._runner, "forward", None)  # whoever computes fails
        trainer.run(lambda now: None)
        trainer._reader.store.close()  # type: ignore[union-attr]


def test_features_stay_within_their_bound(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    reader = reader_of(target, tmp_path, most=20_000)
    for first in range(0, 12, 2):
        reader.read(texts[first : first + 2])
    assert reader.store is not None
    assert 0 < reader.store.num_bytes <= 20_000
    (rows,) = tmp_path.glob("*/rows")
    assert rows.stat().st_size == reader.store.num_bytes
    reader.store.close()
    # A second run has as much room again, up to the bound.
    more = FeatureReader(target, (1, 2), 64, keep_in=tmp_path, keep_bytes=10**9, num_tokens=20)
    assert more.store is not None and more.store._most_bytes > reader.store.num_bytes


def test_a_disk_without_room_is_said(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DataError, match=r"features are to be kept in .* GB are free there"):
        Trainer(new_head(target), texts, QUICK, tmp_path / "a")
    monkeypatch.undo()
    (tmp_path / "b").write_text("a file")
    with pytest.raises(DataError, match="features cannot be kept in"):
        reader_of(target, tmp_path / "b")
    # It runs full in the midst of a run: what was kept is used, the rest is computed.
    reader = reader_of(target, tmp_path / "c")
    reader.read(texts[:2])
    store = reader.store
    assert store is not None

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            self.file.write(data[: len(data) // 2])
            raise OSError("No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    store._rows = Full(store._rows)  # type: ignore[assignment]
    with warnings_logged() as said:
        reader.read(texts[2:4])
        reader.read(texts[4:6])
    assert len(said) == 1 and "No space left" in said[0]
    assert store.get(texts[0]) is not None and store.get(texts[3]) is None
    store.remove()
    assert not list((tmp_path / "c").glob("*"))


def test_where_there_are_no_locks_features_are_kept_all_the_same(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def none(file: Any, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    reader = reader_of(target, tmp_path)
    reader.read(texts[:2])
    assert reader.store is not None and reader.store.num_bytes > 0


def test_many_short_texts_are_read_in_turns(target: Target, texts: list[Text]) -> None:
    few = FeatureReader(target, (1,), 64, max_batch=3).read(texts)
    many = FeatureReader(target, (1,), 64).read(texts)
    torch.testing.assert_close(few.features, many.features, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------- training


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa", "mtp", "draft-model"])
def test_a_head_learns(kind: str, target: Target, texts: list[Text], tmp_path: Path) -> None:
    config = dataclasses.replace(
        QUICK, num_epochs=30, regression=0.05 if kind == "eagle" else 0.0, batch_tokens=256
    )
    said: list[Any] = []
    trainer = Trainer(new_head(target, kind), [*texts, *texts[:2]], config, tmp_path)
    before = trainer.measure()
    after = trainer.run(said.append)  # the held-out texts are among those it learns from
    assert len(after) == 3 and after[0] > before[0]
    assert after[0] > (0.0 if kind == "eagle" else 0.1)  # EAGLE learns to stand for a feature
    assert after[0] >= after[1] >= after[2]
    assert said[-1].loss < said[0].loss and said[-1].share > 0.9
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["steps"] == said[-1].step and record["held_out_survival"][0] > 0
    if kind == "draft-model":
        again, words = load_draft(tmp_path, target)
        assert words is not None and words.tolist() == (torch.arange(64) * 5).tolist()
        for name, tensor in trainer._learnt().items():
            assert torch.equal(again.get_parameter(name), tensor.bfloat16().float())
        return
    load = load_medusa if kind == "medusa" else load_head
    head = load(tmp_path, target.model.config)
    assert isinstance(trainer.learner, HeadLearner)
    assert head.shape == trainer.learner.head.shape


def states(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "checkpoint", weights_only=True)["head"]
    return found


def test_a_seed_makes_the_same_head(target: Target, texts: list[Text], tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        config = dataclasses.replace(QUICK, seed=seed)
        Trainer(new_head(target), texts, config, tmp_path / name).run(lambda now: None)
    one, two, other = (states(tmp_path / name) for name in ("one", "two", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


class KilledError(Exception):
    """Somebody pulled the plug."""


@pytest.mark.parametrize("killed_at", [2, 7])
def test_a_run_that_was_killed_ends_as_if_it_had_not(
    killed_at: int, target: Target, texts: list[Text], tmp_path: Path
) -> None:
    Trainer(new_head(target), texts, QUICK, tmp_path / "whole").run(lambda now: None)
    # A checkpoint with every step, and a kill in the middle of one.
    config = dataclasses.replace(QUICK, checkpoint_minutes=1e-9)

    def kill(now: Any) -> None:
        if now.step == killed_at:
            raise KilledError

    with pytest.raises(KilledError):
        Trainer(new_head(target), texts, config, tmp_path / "cut").run(kill)
    second = Trainer(new_head(target), texts, config, tmp_path / "cut")
    assert second.step == killed_at - 1
    second.run(lambda now: None)
    whole, cut = states(tmp_path / "whole"), states(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_run_that_has_ended_is_not_run_again(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    for config in (QUICK, dataclasses.replace(QUICK, minutes=0.01, num_epochs=1000)):
        folder = tmp_path / str(config.num_epochs)
        Trainer(new_head(target), texts, config, folder).run(lambda now: None)
        before, said = states(folder), []
        Trainer(new_head(target), texts, config, folder).run(said.append)
        assert not said
        assert all(torch.equal(before[name], states(folder)[name]) for name in before)


def test_a_checkpoint_of_another_run_is_refused(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    Trainer(new_head(target), texts, QUICK, tmp_path).run(lambda now: None)
    before = (tmp_path / "checkpoint").read_bytes()
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight += 0.5
    another = prepare_target("tiny", model, make_tokenizer(), CONTEXT, packs=False)
    for head, given, config, shown in (
        (new_head(target, "mtp"), texts, QUICK, "kind 'eagle3' there, 'mtp' here"),
        (new_head(target, num_words=32), texts, QUICK, "draft_vocab_size 64 there, 32 here"),
        (new_head(target), texts[:-1], QUICK, "num_texts 14 there, 13 here"),
        (new_head(target), [*texts[1:], texts[0]], QUICK, "texts '"),
        (new_head(another), texts, QUICK, "target 'tiny"),
        (new_head(target), texts, dataclasses.replace(QUICK, seed=5), "seed 0 there, 5 here"),
    ):
        with pytest.raises(ConfigError, match=f"the checkpoint of another run .*{shown}"):
            Trainer(head, given, config, tmp_path)
    assert (tmp_path / "checkpoint").read_bytes() == before
    (tmp_path / "checkpoint").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="is no checkpoint of a run"):
        Trainer(new_head(target), texts, QUICK, tmp_path)


def test_the_words_of_a_head_go_on_with_it(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    """They are chosen from answers, of which there may be others by now."""
    Trainer(new_head(target), texts, QUICK, tmp_path).run(lambda now: None)
    other = new_head(target)
    other.d2t.copy_(torch.arange(64) * 2)
    trainer = Trainer(other, texts, QUICK, tmp_path)
    assert trainer.learner.d2t.tolist() == (torch.arange(64) * 4).tolist()


def test_of_prompts_a_share_is_learnt_and_of_answers_all() -> None:
    torch.manual_seed(0)
    is_real = torch.ones(4, 500, dtype=torch.bool)
    is_real[2, 300:] = False
    is_answer = torch.zeros(4, 500, dtype=torch.bool)
    is_answer[:, 200:250] = True
    final = torch.randn(4, 500, 8)
    batch = Batch(torch.zeros(4, 500, dtype=torch.int64), is_real, is_answer, final, final)
    output = torch.randn(30, 8)
    for share in (0.0, 0.25, 1.0):
        chance = torch.Generator().manual_seed(4)
        teacher = Teacher(batch, OutputLaw(output), None, share, generator=chance)
        again = Teacher(
            batch, OutputLaw(output), None, share, generator=torch.Generator().manual_seed(4)
        )
        assert torch.equal(teacher.rows, again.rows)
        assert teacher.rows[:, 199:250].all() and not teacher.rows[~is_real].any()
        others = is_real & ~teacher.is_answer
        found = float(teacher.rows[others].float().mean())
        assert found == share or (0 < share < 1 and abs(found - share) < 0.05)
        # Each row has its own part of what the target says.
        goal = teacher.goal(3, 100)
        student = final[:, 4:104][goal.rows] @ output.T
        loss, is_same = goal.distance(student)
        law = torch.softmax(student, -1)
        entropy = -(law * law.log()).sum(-1).mean() if len(law) else 0.0
        assert float(loss) == pytest.approx(float(entropy), abs=1e-4)
        assert is_same[goal.rows].all() and not is_same[~goal.rows].any()


PROGRAM = """
import dataclasses, sys
from pathlib import Path
import torch
from foredraft.model.loader import prepare_target
from foredraft.train.trainer import Trainer
from tests.folders import CONTEXT, make_model, make_tokenizer
from tests.unit import test_train as those
target = prepare_target("tiny", make_model(), make_tokenizer(), CONTEXT, packs=False)
texts = those.some_texts()
config = dataclasses.replace(those.QUICK, num_epochs=1, prompt_share=1.0)
trainer = Trainer(those.new_head(target), texts, config, Path(sys.argv[1]))
trainer.run(lambda now: None)
rank = trainer._accelerator.process_index
torch.save(trainer._learnt(), f"{sys.argv[1]}/rank-{rank}")
"""


def test_two_processes_learn_one_head_from_batches_of_their_own(
    target: Target, tmp_path: Path
) -> None:
    """What two say of their gradients is what one says of the mean of both batches."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program, tmp_path],
        check=True,
        capture_output=True,
        env=environment,
        timeout=300,
    )
    config = dataclasses.replace(QUICK, num_epochs=1, prompt_share=1.0)
    first, second = (torch.load(tmp_path / f"rank-{rank}") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    record = json.loads((tmp_path / "run.json").read_text())
    rng = np.random.default_rng([QUICK.seed, 0])
    order = batches(some_texts()[: -QUICK.num_held_out], QUICK.batch_tokens, QUICK.max_len, rng)
    assert record["steps"] == -(-len(order) // 2) > 1
    # One process by hand: the mean of two gradients, step by step.
    alone = Trainer(new_head(target), some_texts(), config, tmp_path / "alone")
    by_batch: list[list[torch.Tensor]] = []
    num_steps = -(-len(order) // 2)
    for number in range(num_steps):
        by_batch.clear()
        for one in (2 * number, 2 * number + 1):
            batch = alone._reader.read(order[one % len(order)])
            alone.learner.losses(batch, alone._options).total.backward()
            by_batch.append([p.grad.clone() for p in alone._parameters])  # type: ignore[union-attr]
            alone._optimizer.zero_grad()
        for parameter, one_of, other in zip(alone._parameters, *by_batch, strict=True):
            parameter.grad = (one_of + other) / 2
        rate = alone._rate(number / num_steps)
        alone._update(rate)
    mine = alone._learnt()
    for name in mine:
        torch.testing.assert_close(mine[name], first[name], rtol=1e-3, atol=1e-5)


def test_the_rate_goes_by_the_targets_width(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    width = int(target.model.config.hidden_size)
    for given, highest in ((None, 1 / width), (3e-3, 3e-3)):
        config = dataclasses.replace(QUICK, learning_rate=given, warm_up=0.1)
        trainer = Trainer(new_head(target), texts, config, tmp_path / str(given))
        assert trainer._rate(0.1) == pytest.approx(highest)
        assert trainer._rate(1.0) == pytest.approx(highest / 10)
        trainer.save()
        record = json.loads((tmp_path / str(given) / "run.json").read_text())
        assert record["config"]["learning_rate"] == highest


def test_what_makes_no_sense_is_refused(target: Target, texts: list[Text], tmp_path: Path) -> None:
    for name, value, shown in (
        ("learning_rate", 0.0, "learning_rate is 0.0; allowed is a number above 0"),
        ("num_epochs", 0, "num_epochs is 0; allowed is an integer of 1 or more"),
        ("batch_tokens", 1.5, "batch_tokens is 1.5"),
        ("max_len", True, "max_len is True"),
        ("num_levels", -1, "num_levels is -1"),
        ("num_held_out", 0, "num_held_out is 0"),
        ("clip", float("nan"), "clip is nan"),
        ("checkpoint_minutes", 0, "checkpoint_minutes is 0"),
        ("warm_up", -0.1, "warm_up is -0.1; allowed is a number of 0 or more"),
        ("prompt_share", -1, "prompt_share is -1"),
        ("prompt_share", 1.5, "prompt_share is 1.5; allowed is a number from 0 to 1"),
        ("regression", float("inf"), "regression is inf"),
        ("minutes", -1, "minutes is -1"),
    ):
        with pytest.raises(ConfigError, match=shown):
            dataclasses.replace(QUICK, **{name: value})
    with pytest.raises(ConfigError, match="there are 2 texts, of which num_held_out=2 are held"):
        Trainer(new_head(target), texts[:2], QUICK, tmp_path)
    with pytest.raises(ConfigError, match="method is 'ngram'; allowed is one of eagle, eagle3"):
        Run("ngram", "default", tmp_path, tmp_path, QUICK)
    for name, value, shown in (
        ("num_prompts", -1, "num_prompts is -1; allowed is an integer of 0 or more"),
        ("answer_tokens", 0, "answer_tokens is 0; allowed is an integer of 1 or more"),
        ("draft_vocab_size", 1.5, "draft_vocab_size is 1.5"),
        ("answer_minutes", float("nan"), "answer_minutes is nan; allowed is a number"),
        ("num_layers", 3, "num_layers and with_embedding are a draft model's"),
    ):
        with pytest.raises(ConfigError, match=shown):
            Run("eagle3", "default", tmp_path, tmp_path, QUICK, **{name: value})
    pulled = dataclasses.replace(QUICK, regression=0.1)
    none_kept = dataclasses.replace(QUICK, feature_gb=0.0)
    runs: list[tuple[str, TrainConfig, dict[str, Any], str]] = [
        ("medusa", pulled, {}, "regression is 0.1, and medusa stands for no feature"),
        ("draft-model", QUICK, {"init": "x"}, "a draft model begins from the target's layers"),
        ("eagle", none_kept, {"features": tmp_path}, "features names a folder and feature_gb is 0"),
        ("mtp", QUICK, {"init": "x", "draft_vocab_size": 64}, "the head at init has its words"),
    ]
    for method, config, more, shown in runs:
        with pytest.raises(ConfigError, match=shown):
            Run(method, "default", tmp_path, tmp_path, config, **more)


# ------------------------------------------------------------------------------ command line


def run_command(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command([str(argument) for argument in arguments])
    assert not left.value.code


@pytest.mark.parametrize("method", METHODS)
def test_the_command_trains_what_the_engine_loads(
    method: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS * 2]
    path, out = data(tmp_path, *lines), tmp_path / "head"
    arguments = ["train", method, "--data", path, "--out", out, "--model", folder]
    arguments += ["--num-prompts", 8, "--answer-tokens", 16, "--answer-minutes", 5]
    arguments += ["--draft-vocab-size", 64, "--minutes", 0.03, "--num-epochs", 50]
    arguments += ["--batch-tokens", 128, "--max-len", 64, "--num-levels", 2, "--seed", 3]
    arguments += ["--learning-rate", 0.003, "--prompt-share", 0.5, "--regression", 0]
    arguments += ["--num-held-out", 2, "--checkpoint-minutes", 0.01, "--device", "cpu"]
    arguments += ["--feature-gb", 0.5, "--features", tmp_path / "features"]
    arguments += ["--num-layers", 1, "--no-embedding"] if method == "draft-model" else []
    run_command(*arguments, "--json")
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert re.search(r"\d+%  step \d+  loss .* tokens/s  accepted by level 0\.\d\d", said.err)
    assert len(found["held_out_survival"]) == 2
    assert found["acceptance_length"] == pytest.approx(1 + sum(found["held_out_survival"]))
    record = json.loads((out / "run.json").read_text())
    assert record["num_texts"] == 8 and record["method"] == method and not record["init"]
    if method == "eagle3":
        # Another run begins from it, with the answers there are.
        where = arguments.index("--draft-vocab-size")
        arguments = arguments[:where] + arguments[where + 2 :]
        more = ["--init", out, "--answers", out / "answers.jsonl", "--out", tmp_path / "more"]
        run_command(*arguments, *more)
        assert "tokens a step" in capsys.readouterr().out
        assert json.loads((tmp_path / "more" / "run.json").read_text())["init"] == record
        assert not (tmp_path / "more" / "answers.jsonl").exists()
        out = tmp_path / "more"
    options = {"model" if method == "draft-model" else "path": str(out)}
    with LLM(str(folder), drafter_options={method: options}, kv_cache_gb=0.1) as llm:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        plain = llm.generate(PROMPTS[0], sampling, SpeculationParams("none"))[0]
        drafted = llm.generate(PROMPTS[0], sampling, SpeculationParams(method, 3))[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0


def test_what_cannot_be_read_or_written_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    good = data(tmp_path, '{"prompt": "one"}')
    for arguments, shown in (
        (["--data", tmp_path / "none", "--out", tmp_path / "a"], "none cannot be read"),
        (["--data", tmp_path / "file", "--out", tmp_path / "b"], "holds no line"),
        (["--data", good, "--out", tmp_path / "file" / "c"], "--out is .*cannot be made"),
        (["--data", good, "--out", tmp_path / "file"], "--out is .*cannot be made"),
    ):
        with pytest.raises(SystemExit) as left:
            command(["train", "eagle3", "--model", str(folder), *map(str, arguments)])
        out, err = capsys.readouterr()
        assert left.value.code == 2 and not out and err.count("\n") == 1
        assert re.search(shown, err), err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_head_of_another_kind_is_no_beginning(folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    path = data(tmp_path, *lines)
    config = dataclasses.replace(QUICK, num_epochs=1)
    run = Run("mtp", str(folder), path, tmp_path / "mtp", config, answer_tokens=8)
    quiet: Any = lambda *args: None  # noqa: E731
    train(run, quiet, quiet, quiet)
    with pytest.raises(ConfigError, match="is a head of kind 'mtp', and method is 'eagle'"):
        train(
            dataclasses.replace(
                run, method="eagle", init=str(tmp_path / "mtp"), out=tmp_path / "eagle"
            ),
            quiet,
            quiet,
            quiet,
        )
    with pytest.raises(ModelLoadError, match="holds no config"):
        train(dataclasses.replace(run, init=str(tmp_path), out=tmp_path / "x"), quiet, quiet, quiet)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite", "cohere"])
@torch.no_grad()
def test_what_is_learnt_is_the_targets_law(family: str) -> None:
    """With a bias, a scale, or a cap of its logits."""
    import transformers as tf

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": None,
    }
    config = {
        "llama": lambda: tf.LlamaConfig(**sizes),
        "gemma2": lambda: tf.Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0),
        "phi": lambda: tf.PhiConfig(**sizes),
        "granite": lambda: tf.GraniteConfig(**sizes, logits_scaling=4.0),
        "cohere": lambda: tf.CohereConfig(**sizes, logit_scale=0.3),
    }[family]()
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    ids = torch.arange(5, 25)[None]
    wanted = model(ids).logits[0]
    final = model.model(ids).last_hidden_state[0]
    law = OutputLaw.of(model)
    torch.testing.assert_close(law(final), wanted, rtol=1e-4, atol=1e-4)
    few = torch.tensor([3, 50, 9])
    torch.testing.assert_close(law.only(few)(final), wanted[:, few], rtol=1e-4, atol=1e-4)
    drafts = LogitShape.of(config).behind(model.get_output_embeddings())
    torch.testing.assert_close(drafts(final), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@torch.no_grad()
def test_a_head_begins_by_passing_the_feature_on(kind: str, target: Target) -> None:
    """So that its first guess is what the target said last, and not noise of another scale."""
    head = new_head(target, kind).head
    size = head.shape.hidden_size
    ids = torch.arange(5, 25)[None]
    batch = FeatureReader(target, head.shape.feature_layers, 64).read([Text(ids[0].numpy(), 1)])
    embeds = target.model.get_input_embeddings()(ids)
    seen: list[torch.Tensor] = []

    def attend(query: Any, key: Any, value: Any, scaling: Any = None) -> torch.Tensor:
        seen.append(query)
        return torch.zeros(1, 20, size)

    out = head.level(batch.features, embeds, head.rotate(torch.arange(20)[None]), attend)
    output = target.model.get_output_embeddings()
    # The token beside the feature is heard, half as loud, whatever its embedding's size.
    other = head.level(batch.features, -embeds, head.rotate(torch.arange(20)[None]), attend)
    if kind == "eagle":
        share = float((out - other).square().mean().sqrt() / 2 / batch.final.square().mean().sqrt())
        assert 0.35 < share < 0.65
    found = head.logits((out + other) / 2, output).argmax(-1)
    assert len(seen) == 2
    assert float((found == output(batch.final).argmax(-1)).float().mean()) > 0.6


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
@pytest.mark.parametrize("family", ["gemma2", "olmo2", "cohere", "gpt2"])
@torch.no_grad()
def test_heads_begin_from_targets_of_other_families(family: str, kind: str) -> None:
    """Norms that add one, that stand behind a part, or are not there; layers that lie elsewhere."""
    import transformers as tf

    if family == "cohere":
        config = tf.CohereConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=None,
        )
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = family_model(family)
    target = prepare_target(family, model, None, CONTEXT, packs=False)
    head = make_head(shape_for(model.config, kind))
    begin_from_target(head, target)
    assert all(torch.isfinite(parameter).all() for parameter in head.parameters())
    if family == "gemma2" and kind == "eagle3":
        theirs = model.model.layers[-1]
        assert torch.equal(head.norm.weight, model.model.norm.weight + 1)
        own = head.midlayer.post_attention_layernorm.weight
        assert torch.equal(own, theirs.pre_feedforward_layernorm.weight + 1)


def test_minutes_are_not_ended_by_epochs(target: Target, texts: list[Text], tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, minutes=0.03, num_epochs=1)
    said: list[Any] = []
    trainer = Trainer(new_head(target), texts, config, tmp_path)
    trainer.run(said.append)
    assert trainer.epoch > 1 and said[-1].share > 0.8 and trainer.elapsed_s < 60
