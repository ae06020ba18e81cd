"""train(config): build the parts in reading order, then the one loop: collect, update, log, evaluate, save."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from rltool import checkpoint, reporting
from rltool.algos.base import RandomState, Runtime
from rltool.allocation import limited
from rltool.checkpoint import Header, Saver
from rltool.compiling import Compiler
from rltool.console import Console
from rltool.determinism import Determinism
from rltool.devices import describe_device, quieten_libraries, resolve_device
from rltool.errors import CheckpointError, ConfigError, EnvironmentFault, NonFiniteError, Problem
from rltool.evaluation import Evaluator
from rltool.health import Checkup, examine
from rltool.logs import HealthLog, withdraw_point
from rltool.memory import check_memory
from rltool.metrics import Meter, due
from rltool.nets import Preprocessor, network, parameter_count
from rltool.recording import Recorder
from rltool.records import Record
from rltool.runs import RunDirectory, git_commit, program, shown, versions
from rltool.seeding import Stream, draw_seed, generator, seed_world, untouched_world
from rltool.stopping import Interruption, interrupts
from rltool.video import writer
from rltool.watchdog import Watchdog, end_process

if TYPE_CHECKING:
    from rltool.algos.base import Algorithm
    from rltool.collect import Collector
    from rltool.logs import Logger
    from rltool.schema import RunConfig
    from rltool.vectorized import GymVectorEnv


# Parameters times minibatch from which device=auto takes a GPU: six operations each, forwards and backwards, take a CPU
# core some milliseconds; below, a GPU mostly waits for its kernels to start. A guess: never measured on a GPU.
GPU_WORK = 2e7
# How the loop ends of itself, or because a sweep has better runs; all else are names of signals.
_ENDS = ("finished", "solved", "stopped", "pruned")


def train(
    config: RunConfig, directory: Path, overrides: Sequence[str] = (), *, tuned: str | None = None
) -> dict[str, object]:
    """Trains as a checked configuration says, and writes the run into a directory.

    Args:
        config: the whole configuration; ``resume`` continues a checkpoint, ``init`` starts from its weights.
        directory: the run directory; where ``resume`` lies in it, that run goes on, else a new one begins.
        overrides: what was typed, for overrides.txt.
        tuned: name of the tuned file that was applied, for the start block.

    Returns:
        What summary.json holds: ``status`` (finished or solved), ``objective``, frames, evaluations, times.

    Raises:
        ConfigError: the environment or the device cannot be had, or the algorithm cannot learn in its spaces.
        NonFiniteError: an observation, a loss or a weight became NaN or infinite.
        SystemExit: 128 + the signal's number after SIGINT, SIGTERM or SIGUSR1; a checkpoint has been saved.
    """
    quieten_libraries()
    config.buffer.ready()
    torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    origin = checkpoint.read_header(Path(config.resume)) if config.resume is not None else None
    seed = config.seed if config.seed is not None else draw_seed()
    seed_world(seed)

    continues = (
        origin is not None
        and origin.run_directory is not None
        and origin.run_directory.resolve() == directory.resolve()
    )
    with ExitStack() as stack:
        console = stack.enter_context(Console(config))
        # Of two processes that want to continue a run one is turned away before it has said that it does.
        home = stack.enter_context(RunDirectory.open(directory)) if continues else None
        sessions = 1 if origin is None else origin.state.sessions + 1
        env = stack.enter_context(closing(cast("GymVectorEnv", config.env.build(seed=seed, session=sessions - 1))))
        asked, config = config, config.model_copy(update={"seed": seed, "env": env.resolved_config})
        reason = "" if config.device != "auto" or device.type == "cpu" else too_small_for_a_gpu(config, env)
        if reason:
            device = torch.device("cpu")
        budget = max(config.total_frames, 0) if origin is None else origin.state.budget
        compiler = Compiler(_compile_mode(config, origin), planned_updates(config), console.note, console.discount)
        loading = config if origin is None else config.model_copy(update={"network": config.network.for_loading()})
        with nullcontext() if origin is None else limited(origin.path):
            algorithm = built(loading, env, device, budget=budget, seed=seed, compiler=compiler, note=console.note)
        evaluator = camera = None
        if _evaluates(config):
            evaluator = stack.enter_context(
                closing(Evaluator(config.env, num_envs=config.eval.num_envs, device=device))
            )
            _check_alike(env, evaluator)
        if config.eval.video_interval is not None:
            writer()
            camera = Evaluator(config.env, num_envs=1, device=device, render_mode="rgb_array")
            stack.enter_context(closing(camera))
        noise = generator(seed, Stream.POLICY)
        frames = 0 if origin is None else origin.frames
        collector = env.collector(
            algorithm,
            total_frames=config.total_frames,
            generator=noise,
            device=device,
            frames=frames,
            skip=console.warn if config.on_nonfinite == "skip" else None,
        )
        meter = Meter()
        # The collector comes first: starting its environments may draw from the generators that follow.
        algorithm.extras |= {
            "collector": collector,
            "meter": meter,
            "rng.policy": RandomState(noise),
            "rng.torch": RandomState(torch.default_generator),
        }
        if origin is not None:
            _restore(algorithm, collector, origin, config, console, env.unsaved)
        elif config.init is not None:
            source = checkpoint.read_header(Path(config.init))
            for text in source.passed_over:
                console.warn(f"passed over: {text}")
            _initialise(algorithm, config, env, source, console.warn)
            algorithm.counters.warmup = config.algo.warmup_frames  # the statistics have been started already
        _check_batches(config, algorithm)

        begun = False
        if home is None:
            home = stack.enter_context(RunDirectory.create(directory))
            # Of a run that does not come to its first batch nothing is left.
            stack.callback(lambda: None if begun else home.discard())
        console.attach(home.log_path)
        saver = Saver(home.checkpoints, config.save.keep)
        restored = None if origin is None else origin.state
        if restored is not None and not continues:
            restored = replace(restored, best=None)  # its best.ckpt lies in the run it came from
        goes_back = False
        if origin is not None and continues:
            newest = checkpoint.read_header(home.path).frames
            goes_back = newest > frames
            if goes_back:
                console.note(f"the run goes back from frame {newest:,} to {frames:,}; what came after is dropped")
                if not saver.go_back(origin) and origin.state.best is not None:
                    restored = replace(origin.state, best=None)
                    console.note(
                        "the policy that was the best one then is no longer there: the best is looked for anew"
                    )
        # What is written is what runs, also after a resume with changed values.
        home.write_config((config.model_copy(update={"resume": None}) if continues else config).model_dump(mode="json"))
        if not continues:
            home.write_overrides(overrides)
        elif origin is not None:
            withdraw_point(home.path, meter.since, frames)
            home.add_overrides(f"resumed at frame {frames:,}", overrides)
        logger = cast("Logger", config.logging.build(directory=home.path, start_frames=frames, warn=console.warn))
        stack.callback(logger.close)
        checkup = _checkup(config, evaluator, home.path if continues else None, frames)
        health = HealthLog(home.path, checkup.told, console.warn)
        stack.callback(health.close)
        logger.start(config.model_dump(mode="json"))
        logger.text("config", f"```yaml\n{home.config_path.read_text(encoding='utf-8')}```")
        identity: dict[str, object] = {
            "config": config.model_copy(update={"resume": None, "init": None}).model_dump(mode="json"),
            "leaves": [leaf.to_json() for leaf in env.leaves],
            "actions": algorithm.actions.to_json(),
            "env": env.id,
            "budget": budget,
            "compiled": compiler.enabled,
            "sessions": sessions,
            "versions": versions(),
            "parent": origin.state.parent if origin is not None and continues else config.resume or config.init,
        }
        record = Recorder(
            config,
            algorithm,
            collector,
            evaluator,
            camera,
            meter=meter,
            logger=logger,
            console=console,
            saver=saver,
            home=home,
            identity=identity,
            restored=restored,
            typed=_typed_keys(overrides),
            determinism=Determinism(asked.seed, getattr(asked.env, "backend", None), device),
            checkup=checkup,
            health=health,
        )
        parts = parameter_count(
            *(part for part in algorithm.components().values() if isinstance(part, torch.nn.Module))
        )
        console.start(
            [
                ("environment", f"{env.id}, {env.num_envs} side by side"),
                ("spaces", f"{', '.join(map(str, env.leaves))} → {env.actions}"),
                *env.remarks,
                ("algorithm", f"{config.algo.kind}, {_budget_in_words(config, algorithm, frames)}"),
                ("network", f"{config.network.kind}, {parts:,} parameters"),
                ("device", f"{describe_device(device, config.device, reason)}; threads {config.threads}"),
                ("compile", f"{'yes' if compiler.enabled else 'no'} ({_compile_reason(config, origin, compiler)})"),
                ("seed", str(seed)),
                ("tuned", tuned or ("none" if origin is None else "as in the checkpoint")),
                *([("resumed", f"{shown(origin.path)} at frame {frames:,}")] if origin is not None else []),
                *([("weights", f"from {shown(Path(config.init))}")] if config.init is not None else []),
                ("directory", shown(home.path)),
            ],
            frames=frames,
        )
        if planned_updates(config) == 0 and _learns_by_steps(config) and config.init is None:
            first = [name for name in ("warmup_frames", "learning_starts") if hasattr(config.algo, name)]
            console.warn(
                f"total_frames={config.total_frames} is too few to learn from: no gradient step is made before "
                f"{' and '.join(f'algo.{name}={getattr(config.algo, name):,}' for name in first)} and one batch are over"
            )
        if config.total_frames > frames and config.optim.lr_at(frames, budget) == 0:
            console.warn(
                "the learning rate has fallen to 0 and stays there: nothing more will be learned. Give "
                "optim.schedule=constant and optim.lr=…"
            )
        begun = True
        if continues:
            # Until this process says how it ended, nobody has.
            home.write_summary({**Record(home.path).summary, "status": "running"})
        if goes_back or (origin is not None and continues and origin.state.config != identity["config"]):
            record.save_last()  # what runs from here on is what is resumed, also where this process is killed at once
        return _recorded(config, algorithm, collector, record, home, console)


def rehearse(config: RunConfig) -> None:
    """Builds what a run begins with, and throws it away: nothing is trained and nothing written.

    Args:
        config: as :func:`train` takes it; of a run that does not resume another.

    Raises:
        ConfigError, CheckpointError: as :func:`train`, before its first frame.
    """
    quieten_libraries()
    config.buffer.ready()
    device = resolve_device(config.device)
    seed = config.seed or 0
    seed_world(seed)
    with closing(cast("GymVectorEnv", config.env.build(seed=seed, session=0))) as env:
        config = config.model_copy(update={"env": env.resolved_config, "network": config.network.for_loading()})
        compiler = Compiler(False, 0, str)
        budget = max(config.total_frames, 0)
        algorithm = built(config, env, device, budget=budget, seed=seed, compiler=compiler, note=lambda _: None)
        if config.init is not None:
            _initialise(algorithm, config, env, checkpoint.read_header(Path(config.init)), str)
        if _evaluates(config):
            with closing(Evaluator(config.env, num_envs=config.eval.num_envs, device=device)) as evaluator:
                _check_alike(env, evaluator)
        _check_batches(config, algorithm)


def built(
    config: RunConfig,
    env: GymVectorEnv,
    device: torch.device,
    *,
    budget: int,
    seed: int,
    compiler: Compiler,
    note: Callable[[str], None],
) -> Algorithm:
    """The algorithm of a configuration, for these environments; arguments as in :class:`rltool.algos.base.Runtime`."""
    runtime = Runtime(
        env=env.id,
        leaves=env.leaves,
        actions=env.actions,
        num_envs=env.num_envs,
        network=config.network,
        optim=config.optim,
        buffer=config.buffer,
        device=device,
        budget=budget,
        seed=seed,
        skip_nonfinite=config.on_nonfinite == "skip",
        compiler=compiler,
        note=note,
    )
    return cast("Algorithm", config.algo.build(run=runtime))


def too_small_for_a_gpu(config: RunConfig, env: GymVectorEnv) -> str:
    """Why a gradient step is faster on the CPU, in words; nothing where it is not: with images, or large networks."""
    if any(leaf.kind == "image" for leaf in env.leaves):
        return ""
    inputs, size = Preprocessor(env.leaves, normalize=False), getattr(config.algo, "minibatch_size", 1)
    with untouched_world():
        weights = parameter_count(network(config.network.for_loading(), inputs, env.actions.size, torch.Generator()))
    if weights * size >= GPU_WORK:
        return ""
    return f"networks of {weights:,} parameters in minibatches of {size} are faster there"


def loop(
    config: RunConfig, algorithm: Algorithm, collector: Collector, record: Recorder, interrupted: Interruption
) -> str:
    """The one loop. Returns how it ended: ``finished``, ``solved``, ``stopped`` (by ``stop.on``), ``pruned`` (called off by
    a sweep), or the name of a signal."""
    before = collector.frames
    for batch in collector:
        frames = collector.frames
        record.clock.lap("collect")
        metrics = algorithm.update(batch, frames)
        record.clock.lap("update")
        record.batch(metrics)
        if due(before, frames, config.logging.interval):
            record.log()
        else:
            record.show()
        record.clock.lap("log")
        if due(before, frames, config.eval.interval):
            record.evaluate()
        if due(before, frames, config.eval.video_interval):
            record.film()
        record.clock.lap("evaluate")
        if due(before, frames, config.save.interval):
            record.save()
        record.clock.lap("save")
        before = frames
        if interrupted.by is not None:
            return interrupted.by.name
        if record.solved:
            return "solved"
        if record.hopeless is not None:
            return "stopped"
        if record.called_off:
            return "pruned"
    return "finished"


def _recorded(
    config: RunConfig,
    algorithm: Algorithm,
    collector: Collector,
    record: Recorder,
    home: RunDirectory,
    console: Console,
) -> dict[str, object]:
    """Runs the loop and writes down how it ended, whatever happens."""

    def lost(fault: EnvironmentFault) -> None:
        """Ends the process, whose main thread hangs in an environment; called in another thread."""
        try:
            fault.frame = collector.frame
            _write_down(fault, record, home, console)
            console.__exit__(None, None, None)
            reporting.show(fault, "rltool train")
        finally:
            end_process(fault.exit_code)

    try:
        with interrupts(console.note) as interrupted, Watchdog(config.env.timeout, lost, home.log_path):
            ended = loop(config, algorithm, collector, record, interrupted)
            if collector.left_out and ended in _ENDS and not algorithm.counters.updates:
                raise NonFiniteError(
                    f"{collector.left_out} of {collector.batches} batches were not finite, and nothing was learned: mend the "
                    "environment, or look at what it is given",
                    learned=False,
                )
            if ended == "pruned":  # nobody will ask how good it is
                record.save_last()
                record.log_rest()
            elif ended in _ENDS:
                record.log_rest()
                record.evaluate()
                record.save_last()
                record.judge(lambda: interrupted.by is not None)
            else:
                record.save_last()  # with the open interval, which goes on
                record.log_rest()
    except BaseException as fault:
        _write_down(fault, record, home, console)
        raise
    if ended not in _ENDS:
        _write_summary(home, record, "interrupted", ended)
        console.finish(
            [
                ("stopped by", ended),
                ("frames", f"{collector.frames:,}"),
                ("saved", shown(home.checkpoints / checkpoint.LAST)),
            ],
            [f"{program('rltool')} train resume={shown(home.path)}"],
        )
        raise SystemExit(128 + signal.Signals[ended])
    summary = _write_summary(home, record, ended, None)
    record.finish(summary)
    console.finish(record.result_rows(ended), record.next_commands())
    return summary


def _write_down(fault: BaseException, record: Recorder, home: RunDirectory, console: Console) -> None:
    """Writes down what ended the run, and the state before it where that is sound. Nothing here may hide the fault itself,
    also where the disk is full."""
    if isinstance(fault, EnvironmentFault) or (isinstance(fault, NonFiniteError) and not fault.learned):
        try:
            record.save_last()  # as the batch began; what was learned is sound
        except Exception as error:
            console.warn(f"the state before this batch could not be saved: {error}")
    with suppress(Exception):
        try:
            at = checkpoint.read_header(home.path).frames
            console.note(
                f"{program('rltool')} train resume={shown(home.path)} goes on from frame {at:,}, which is saved"
            )
        except CheckpointError:
            console.note("no checkpoint had been written yet: there is nothing to go on from")
    with suppress(Exception):
        record.log_rest()
    if isinstance(fault, NonFiniteError) and fault.batch:
        kept = home.path / f"nonfinite-{record.state().frames}.safetensors"
        try:
            checkpoint.write_tensors(kept, fault.batch, {"found": str(fault)})
            fault.add_note(f"The batch is kept in {shown(kept)}")
        except Exception as error:
            console.warn(f"the batch could not be kept: {error}")
    with suppress(OSError), open(home.log_path, "a", encoding="utf-8") as log:
        log.write("".join(traceback.format_exception(fault)))
        if isinstance(fault, EnvironmentFault) and fault.__cause__ is None:
            log.write(fault.trace)
    with suppress(Exception):
        status = "interrupted" if isinstance(fault, KeyboardInterrupt) else "failed"
        _write_summary(home, record, status, f"{type(fault).__name__}: {fault}")


def _write_summary(home: RunDirectory, record: Recorder, status: str, error: str | None) -> dict[str, object]:
    summary = record.summary(status, error) | {"directory": str(home.path), "git_commit": git_commit(Path.cwd())}
    home.write_summary(summary)
    return summary


def _restore(
    algorithm: Algorithm, collector: Collector, origin: Header, config: RunConfig, console: Console, unsaved: str
) -> None:
    """Puts everything that a checkpoint holds back.

    Args:
        unsaved: the part of the environments that cannot be saved.
    """
    checkpoint.load(algorithm, origin.path)
    checkpoint.restore_random_state(origin.state.random)
    whole = checkpoint.load_buffer(algorithm, origin.path, origin.frames) is not False
    if not whole:
        console.warn(
            "no replay buffer lies beside this checkpoint (or none that is whole and of its moment): learning goes on once "
            "learning_starts frames are collected anew"
        )
    if collector.continued:
        what = "everything continues" if whole else "all else continues"
        console.note(f"{what} where the checkpoint was taken, the open episodes too")
    else:
        algorithm.abandon_episodes()
        reason = f": {unsaved} cannot be saved" if unsaved else ", which the checkpoint does not hold"
        console.note(f"open episodes start anew{reason}; all else continues where the checkpoint was taken")
    if config.total_frames > origin.state.budget > 0:
        console.note(f"schedules ran over the first budget of {origin.state.budget:,} frames and stay at their end")


def _initialise(
    algorithm: Algorithm, config: RunConfig, env: GymVectorEnv, header: Header, warn: Callable[[str], object]
) -> None:
    """Takes weights and normaliser of a checkpoint, nothing else.

    Raises:
        ConfigError: it has other spaces or another network.
    """
    if header.leaves != tuple(env.leaves) or replace(header.actions, squash="clip") != env.actions:
        raise ConfigError(
            Problem("init", f"{header.path} was trained on {header.state.env}, whose spaces are not those of {env.id}")
        )
    try:
        checkpoint.load(algorithm, header.path, only=("policy", "critic", "target", "normalizer"))
    except CheckpointError as error:
        kind = cast("dict[str, object]", header.config["algo"])["kind"]
        text = f"its networks, those of {kind}, do not fit {config.algo.kind} with this network: {error}"
        raise ConfigError(Problem("init", text)) from error
    if header.state.env != env.id:
        warn(f"the weights come from {header.state.env}, and this run is on {env.id}; their spaces agree")


def _typed_keys(overrides: Sequence[str]) -> set[str]:
    """The dotted keys of overrides; of a group's choice what says best which it was."""
    names = {"env": "env.id", **{group: f"{group}.kind" for group in ("algo", "network", "buffer", "optim")}}
    keys = (word.partition("=")[0].lstrip("+~") for word in overrides)
    return {names.get(key, key) for key in keys}


def _checkup(config: RunConfig, evaluator: Evaluator | None, directory: Path | None, frames: int) -> Checkup:
    """What looks for faults in a run.

    Args:
        directory: that of a run which continues: its points up to ``frames`` have been looked at; None of a new one.
    """
    points = [] if directory is None else [point for point in Record(directory).points if point["frames"] <= frames]
    threshold = None if evaluator is None else evaluator.threshold
    return examine(points, config.model_dump(mode="json"), threshold)


def _evaluates(config: RunConfig) -> bool:
    return config.eval.interval is not None or config.eval.final_episodes > 0


def _check_batches(config: RunConfig, algorithm: Algorithm) -> None:
    """Asks whether the largest batch fits into the memory that is free.

    Raises:
        ConfigError: it does not.
    """
    frames, key = algorithm.batch_frames, "algo.frames_per_batch"
    # A piece of the random warm-up may be larger, but with TorchRL's collector, whose batches have one size.
    if algorithm.frames_per_batch > frames and not config.env.whole_batches:
        frames, key = algorithm.frames_per_batch, "algo.warmup_frames"
    needed = frames * algorithm.bytes_per_frame()
    check_memory(needed, key, f"{frames:,} frames at a time", "Lower it, or make the observations smaller")


def _check_alike(env: GymVectorEnv, evaluator: Evaluator) -> None:
    """Asks whether evaluation observes and acts as training does.

    Raises:
        ConfigError: it does not: a wrapper has arguments of its own in evaluation.
    """
    for what, trained, judged in (
        ("observes", [str(leaf) for leaf in env.leaves], [str(leaf) for leaf in evaluator.leaves]),
        ("acts in", [str(env.actions)], [str(evaluator.actions)]),
    ):
        if trained != judged:
            raise ConfigError(
                Problem(
                    "env.wrappers",
                    f"evaluation {what} {', '.join(judged)}, and training {', '.join(trained)}",
                    "The eval of a wrapper may not change the spaces",
                )
            )


def _compile_mode(config: RunConfig, origin: Header | None) -> Literal["auto"] | bool:
    """Whether to compile: a resumed run does what it did before (compiled and eager differ in the last digits), unless
    the user says otherwise."""
    return origin.state.compiled if origin is not None and _keeps_compile(config, origin) else config.compile


def _keeps_compile(config: RunConfig, origin: Header) -> bool:
    """Whether a resumed run asks for compilation as the checkpoint does."""
    return config.compile == origin.config.get("compile")


def _compile_reason(config: RunConfig, origin: Header | None, compiler: Compiler) -> str:
    """Why a run compiles or not, in words."""
    kept = origin is not None and _keeps_compile(config, origin)
    return "as in the checkpoint" if kept and compiler.reason == "as configured" else compiler.reason


def _learns_by_steps(config: RunConfig) -> bool:
    """Whether the algorithm would make gradient steps with frames enough."""
    return config.algo.updates(config.model_copy(update={"total_frames": 10**9})) > 0


def planned_updates(config: RunConfig) -> int:
    """Gradient steps of the whole budget; -1 where it has no end."""
    return config.algo.updates(config) if config.total_frames > 0 else -1


def _budget_in_words(config: RunConfig, algorithm: Algorithm, frames: int) -> str:
    """The budget, and where the run really ends: batches are whole, and so are the pieces of the warm-up."""
    budget, num_envs = config.total_frames, config.env.num_envs
    if budget < 0:
        return "until stopped"
    left = budget - frames
    if left <= 0:
        return f"{budget:,} frames, all of them collected before"
    warmup = config.algo.warmup_end(config.env) - algorithm.counters.warmup if algorithm.warming_up else 0
    batch = config.algo.batch_frames(num_envs)
    if left <= warmup:
        piece = batch if config.env.whole_batches else -(-algorithm.frames_per_batch // num_envs) * num_envs
        end = frames + min(-(-left // piece) * piece, warmup)
        return f"{budget:,} frames, all of them random" if end == budget else f"{budget:,} frames ({end:,} random ones)"
    batches = -(-(left - warmup) // batch)
    end = frames + warmup + batches * batch
    if end == budget:
        return f"{budget:,} frames"
    parts = ([f"{warmup:,} random ones first"] if warmup else []) + [
        f"{batches:,} batch{'es' if batches != 1 else ''} of {batch:,}"
    ]
    return f"{budget:,} frames ({', '.join(parts)}: {end:,})"
