"""The loop: batches of the target's texts, an optimiser, checkpoints that go on exactly.

Accelerate carries the loop over one device or many: each process learns from batches of its own,
and the gradients' mean is everybody's. A checkpoint holds the head, the optimiser, the number of
the step; the order of batches is a function of the seed and the epoch, and what is chosen by chance
of the seed and the step, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foredraft.errors import ConfigError, MissingExtraError, said
from foredraft.heads.shape import default_feature_layers
from foredraft.train.features import Batch, FeatureReader
from foredraft.train.learner import Learner
from foredraft.train.texts import Text, batches
from foredraft.train.unroll import Options

if TYPE_CHECKING:
    from foredraft.model.loader import Target


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of a run.

    Attributes:
        learning_rate: At its highest; ``None`` takes 1 / hidden size of the target.
        warm_up: Share of the steps in which it rises; then it falls by a cosine to a tenth.
        num_epochs: Times that each text is learnt from.
        batch_tokens: Tokens of a step, padding counted.
        max_len: Longest text; what is longer is cut.
        num_levels: Levels of the training-time test.
        prompt_share: Share of the prompts' tokens that are learnt from; of answers all are.
        regression: Weight of the distance to the target's feature, 0 for none.
        clip: Largest norm of a gradient.
        num_held_out: Texts that are not learnt from but measured on.
        minutes: The run ends after so many, its schedule fitted to them, however many epochs that
            is; 0 goes by ``num_epochs``.
        checkpoint_minutes: Between checkpoints.
        feature_gb: Most gigabytes of the target's features that are kept on disk while the run
            lasts, so that a text is read by the target once; 0 computes them each time.
        seed: Of everything random.

    Raises:
        ConfigError: A value that makes no sense.
    """

    learning_rate: float | None = None
    warm_up: float = 0.03
    num_epochs: int = 2
    batch_tokens: int = 1024
    max_len: int = 512
    num_levels: int = 4
    prompt_share: float = 0.2
    regression: float = 0.0
    clip: float = 0.5
    num_held_out: int = 48
    minutes: float = 0.0
    checkpoint_minutes: float = 5.0
    feature_gb: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("num_epochs", "batch_tokens", "max_len", "num_levels", "num_held_out"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer of 1 or more.")
        for name, least in (
            ("learning_rate", 0.0),
            ("clip", 0.0),
            ("checkpoint_minutes", 0.0),
        ):
            value = getattr(self, name)
            if value is None and name == "learning_rate":
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= least:
                raise ConfigError(f"{name} is {value!r}; allowed is a number above 0.")
        if isinstance(self.prompt_share, int | float) and self.prompt_share > 1:
            raise ConfigError(
                f"prompt_share is {self.prompt_share!r}; allowed is a number from 0 to 1."
            )
        for name in ("warm_up", "prompt_share", "regression", "minutes", "feature_gb"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value!r}; allowed is a number of 0 or more.")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: Steps done.
        share: Of the whole run, 0 to 1.
        loss: Of late.
        survival: Of a greedy chain on held-out answers, by level; empty before it was measured.
        tokens_per_s: Tokens learnt from.
    """

    step: int
    share: float
    loss: float
    survival: tuple[float, ...]
    tokens_per_s: float


def need_accelerate() -> None:
    """Refuse to begin without the package that carries the loop."""
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("training needs the package accelerate; install foredraft[train].")


class Trainer:
    """Trains a head for a target.

    Args:
        learner: What learns, and from which target.
        texts: What to learn from; the last ``num_held_out`` are held out.
        config: Options.
        folder: Where the head and its checkpoints go.
        record: What else to write into the run record.
        features: Folder to keep features in for other runs too, of heads of any kind; ``None``
            keeps them in ``folder`` while the run lasts.
    """

    def __init__(
        self,
        learner: Learner,
        texts: Sequence[Text],
        config: TrainConfig,
        folder: str | Path,
        record: dict[str, Any] | None = None,
        features: Path | None = None,
    ) -> None:
        """Make the optimiser; go on where a checkpoint in the folder stands."""
        need_accelerate()
        from accelerate import Accelerator
        from accelerate.utils import broadcast

        self._broadcast = broadcast
        if len(texts) <= config.num_held_out:
            raise ConfigError(
                f"there are {len(texts)} texts, of which num_held_out={config.num_held_out} are "
                "held out; give more prompts, or hold out fewer."
            )
        torch.manual_seed(config.seed)
        self.config, self.folder = config, Path(folder)
        self._record = record or {}
        self.learner, target = learner, learner.target
        self._held_out = list(texts[-config.num_held_out :])
        self._texts = list(texts[: -config.num_held_out])
        self._options = Options(
            learner.num_levels or config.num_levels,
            prompt_share=config.prompt_share,
            regression=config.regression,
        )
        self._accelerator = Accelerator(cpu=target.device.type == "cpu")
        self._reader = FeatureReader(
            target,
            learner.feature_layers,
            config.max_len,
            keep_in=(features or self._features) if config.feature_gb else None,
            keep_bytes=int(config.feature_gb * 1e9),
            num_tokens=sum(min(config.max_len, len(text.token_ids)) for text in texts),
            keep_layers=_layers_of_all(target) if features else (),
            max_batch=max(1, min(256, 2 * config.batch_tokens // config.max_len)),
        )
        self._keeps_features = features is not None
        self._highest_rate = config.learning_rate or 1 / int(target.model.config.hidden_size)
        self._parameters = [p for p in learner.module.parameters() if p.requires_grad]
        self._optimizer = self._accelerator.prepare(
            torch.optim.AdamW(
                self._parameters, self._highest_rate, betas=(0.9, 0.95), weight_decay=0.01
            )
        )
        self.step = self.epoch = self.batch = 0
        self.elapsed_s = 0.0
        self.num_tokens = 0
        self.survival: tuple[float, ...] = ()
        self._resume()

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def _features(self) -> Path:
        """Each process keeps its own."""
        return self.folder / f"features-{self._accelerator.process_index}"

    def run(self, tell: Callable[[Progress], None]) -> tuple[float, ...]:
        """Train to the end; return the survival on held-out answers, by level."""
        started, before = time.monotonic(), self.elapsed_s
        saved_at = started
        recent: list[float] = []
        self.learner.module.train()
        is_over = False
        here, num_processes = self._accelerator.process_index, self._accelerator.num_processes
        while not is_over and (self.config.minutes or self.epoch < self.config.num_epochs):
            epoch = self.epoch
            rng = np.random.default_rng([self.config.seed, epoch])
            order = batches(self._texts, self.config.batch_tokens, self.config.max_len, rng)
            num_steps = -(-len(order) // num_processes)
            for number in range(self.batch, num_steps):
                self._agree_on_time()
                if self.config.minutes and self.elapsed_s > 60 * self.config.minutes:
                    is_over = True
                    break
                share = self._share(epoch, number, num_steps)
                all_of_them = range(number * num_processes, (number + 1) * num_processes)
                step = [order[one % len(order)] for one in all_of_them]
                recent.append(self._learn(self._reader.read(step[here]), share))
                self.num_tokens += sum(len(text.token_ids) for batch in step for text in batch)
                self.step, self.batch = self.step + 1, number + 1
                now = time.monotonic()
                self.elapsed_s = before + now - started
                recent = recent[-20:]
                rate = self.num_tokens / max(self.elapsed_s, 1e-9)
                tell(Progress(self.step, share, float(np.mean(recent)), self.survival, rate))
                if now - saved_at > 60 * self.config.checkpoint_minutes:
                    self.survival = self.measure()
                    self.save()
                    saved_at = time.monotonic()
            if not is_over:
                self.epoch, self.batch = epoch + 1, 0
        self.survival = self.measure()
        self.save()
        if self._reader.store is not None and not self._keeps_features:
            self._reader.store.remove()
        return self.survival

    @torch.no_grad()
    def measure(self) -> tuple[float, ...]:
        """Survival of a greedy chain on held-out answers, by level."""
        self.learner.module.eval()
        rng = np.random.default_rng(self.config.seed)
        num_levels = self._options.num_levels
        accepted, counted = torch.zeros(num_levels), torch.zeros(num_levels)
        for batch in batches(self._held_out, self.config.batch_tokens, self.config.max_len, rng):
            options = dataclasses.replace(self._options, prompt_share=0.0, is_measuring=True)
            found = self.learner.losses(self._reader.read(batch), options)
            size = len(found.accepted)  # short texts have fewer levels
            accepted[:size] += found.accepted.cpu()
            counted[:size] += found.counted.cpu()
        self.learner.module.train()
        return tuple((accepted / counted.clamp(min=1)).tolist())

    def save(self) -> None:
        """Write the head, its run record, and what it takes to go on."""
        if not self._accelerator.is_main_process:
            return
        self.learner.save(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {
            **self._record,
            "config": dataclasses.asdict(self.config) | {"learning_rate": self._highest_rate},
            "steps": self.step,
            "epochs": self.epoch + (self.batch > 0),
            "tokens": self.num_tokens,
            "seconds": round(self.elapsed_s),
            "held_out_survival": [round(value, 4) for value in self.survival],
            "torch": torch.__version__,
        }
        _write(self.folder / "run.json", json.dumps(record, indent=2, sort_keys=True) + "\n")
        state = {
            "run": self._identity(),
            "head": self._learnt(),
            "d2t": self.learner.d2t,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "tokens": self.num_tokens,
            "elapsed_s": self.elapsed_s,
            "survival": self.survival,
        }
        new = self.folder / "checkpoint.new"
        torch.save(state, new)
        new.replace(self._checkpoint)

    def _learnt(self) -> dict[str, torch.Tensor]:
        """What the optimiser changes, by name."""
        found = self.learner.module.named_parameters()
        return {name: p.detach() for name, p in found if p.requires_grad}

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on: what is learnt, from what, in which order."""
        config = self.config
        return {
            **self.learner.identity(),
            "target": self._reader.owner,
            "texts": self._hash_of_texts(),
            "num_processes": self._accelerator.num_processes,
            "num_texts": len(self._texts) + len(self._held_out),
            "num_levels": self._options.num_levels,
            "batch_tokens": config.batch_tokens,
            "max_len": config.max_len,
            "num_held_out": config.num_held_out,
            "seed": config.seed,
        }

    def _hash_of_texts(self) -> str:
        found = hashlib.sha256()
        for text in (*self._texts, *self._held_out):
            found.update(text.token_ids.tobytes())
        return found.hexdigest()[:16]

    def _resume(self) -> None:
        if not self._checkpoint.is_file():
            return
        try:
            state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
            run = state["run"]
        except Exception as error:  # pickle raises what it likes
            raise ConfigError(
                f"{self._checkpoint} is no checkpoint of a run ({said(error)}); name another "
                "folder, or remove it to begin anew."
            ) from error
        mine = self._identity()
        differs = [name for name in mine if mine[name] != run.get(name)]
        if differs:
            shown = ", ".join(
                f"{name} {run.get(name)!r} there, {mine[name]!r} here" for name in differs
            )
            raise ConfigError(
                f"{self.folder} holds the checkpoint of another run ({shown}); name another "
                "folder, or the same options to go on."
            )
        self.learner.module.load_state_dict(state["head"], strict=False)
        self.learner.d2t.copy_(state["d2t"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        self.num_tokens, self.elapsed_s = state["tokens"], state["elapsed_s"]
        self.survival = tuple(state["survival"])

    def _share(self, epoch: int, number: int, num_batches: int) -> float:
        if self.config.minutes:
            return min(1.0, self.elapsed_s / (60 * self.config.minutes))
        return (epoch + number / num_batches) / self.config.num_epochs

    def _agree_on_time(self) -> None:
        """All go by the first process's clock: the rate of learning follows from it."""
        if self.config.minutes and self._accelerator.num_processes > 1:
            said_of = torch.tensor(self.elapsed_s, dtype=torch.float64).to(self._accelerator.device)
            self.elapsed_s = float(self._broadcast(said_of))

    def _learn(self, batch: Batch, share: float) -> float:
        """One step."""
        keys = [self.config.seed, self.step, self._accelerator.process_index]
        chance = int(np.random.SeedSequence(keys).generate_state(1)[0])
        options = dataclasses.replace(
            self._options, generator=torch.Generator().manual_seed(chance)
        )
        found = self.learner.losses(batch, options)
        self._accelerator.backward(found.total)
        if self._accelerator.num_processes > 1:
            for parameter in self._parameters:
                if parameter.grad is None:  # nothing of it was used here, but elsewhere
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")
        self._update(self._rate(share))
        return float(found.total.detach())

    def _rate(self, share: float) -> float:
        """The learning rate after so much of the run."""
        warm_up = self.config.warm_up
        if share < warm_up:
            return self._highest_rate * (share + 1e-3) / (warm_up + 1e-3)
        done = (share - warm_up) / max(1e-9, 1 - warm_up)
        return self._highest_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    def _update(self, rate: float) -> None:
        """Go by the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._accelerator.clip_grad_norm_(self._parameters, self.config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _layers_of_all(target: Target) -> tuple[int, ...]:
    """Layers that heads of any kind read, if they are new."""
    return default_feature_layers(int(target.model.config.num_hidden_layers))


def _write(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
