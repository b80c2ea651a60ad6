"""Jobs that do what they were started for. Stopping one of them at any time destroys work."""

from typing import Final

from tests.corpus.boards import (
    A100_40,
    A100_80,
    B200,
    DATA_CENTRE,
    DESKTOPS,
    GB200,
    H100,
    H100_SLICE,
    H200,
    L40S,
    RTX_3090,
    RTX_4090,
    SERVERS,
    V100_SXM,
    WHOLE,
    WITH_MEMORY_COUNTER,
)
from tests.corpus.script import HOUR, MINUTE, Draw, Fault, Guest, Load, Script
from tests.corpus.trace import ANY_TRUST, STEPS, setting, trace_class

SEVERAL: Final = (2, 4, 8, 8)


@trace_class("healthy", "Training at a steady pace with a short checkpoint now and then.", "common", 16)
def steady_training(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (*WHOLE, H100_SLICE)))
    script.start()
    script.train(draw.hours(4, 9))
    return script


@trace_class("healthy", "A model too small for its GPU: utilization of 3 to 30 % all the time.", "common", 12)
def small_model(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 1, 2)))
    script.start()
    load = script.light(draw.between(0.03, 0.3), depth=draw.between(0.1, 0.5))
    script.train(draw.hours(3, 8), load=load, step_every=draw.between(0.01, 0.5))
    return script


@trace_class(
    "healthy",
    "Downloads its data set for 4 to 6 hours before the first kernel, with little CPU and steady I/O.",
    "codalab-worksheets#3979",
    10,
)
def long_download(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 2, 4)))
    waiting = script.everywhere_bare() if draw.chance(0.6) else script.everywhere(script.resting(0.4))
    lines = draw.one_of((10.0, 60.0, 1e9))
    rate = draw.between(3e6, 2.5e7)
    script.add(draw.hours(4, 6), waiting, line_every=lines, cpu=draw.between(0.1, 0.5), io=rate)
    script.train(draw.hours(1, 3))
    return script


@trace_class(
    "healthy", "Tokenizes its data for 1 to 3 hours on all cores before the first kernel.", "accelerate#314", 8
)
def long_preprocessing(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 2, 8)))
    waiting = script.everywhere_bare() if draw.chance(0.5) else script.everywhere(script.resting(0.4))
    script.add(draw.hours(1, 3), waiting, line_every=30, cpu=draw.between(4, 40), io=draw.between(1e6, 1e8))
    script.train(draw.hours(2, 4))
    return script


@trace_class(
    "healthy",
    "Compiles kernels for 10 to 40 minutes on the CPU, at the start and again when a shape changes.",
    "levanter, recovery/detection.py: recompilations are legitimate",
    10,
)
def compilation(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.add(draw.minutes(10, 40), script.resting(), cpu=draw.between(1, 12), io=draw.between(1e3, 1e6))
    script.train(draw.hours(1, 3))
    script.add(draw.minutes(10, 30), script.resting(), cpu=draw.between(1, 6), io=draw.between(1e3, 1e6))
    script.train(draw.hours(1, 3))
    return script


@trace_class(
    "healthy",
    "All ranks but one wait in a barrier at 100 % for 30 to 90 minutes while rank 0 prepares the data.",
    "accelerate#314, nccl#708",
    12,
)
def barrier_at_start(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    others = [script.spinning() for _ in range(script.setting.used - 1)]
    loads = script.each(script.resting(0.5), *others)
    lines = draw.one_of((5.0, 60.0, 1e9))
    script.add(
        draw.minutes(30, 90), loads, line_every=lines, cpu=script.setting.used + draw.between(0, 8), collective=True
    )
    script.train(draw.hours(2, 4))
    return script


@trace_class(
    "healthy",
    "After each epoch one process evaluates on the CPU for 31 to 50 minutes while its GPU does nothing.",
    "PufferDrive#397 keeps GPUs busy artificially for this reason",
    10,
)
def cpu_evaluation(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2)))
    script.start()
    for _ in range(draw.count(2, 4)):
        script.train(draw.minutes(30, 90))
        lines = draw.one_of((2.0, 60.0, 1e9))
        script.add(draw.minutes(31, 50), script.resting(), line_every=lines, cpu=draw.between(0.9, 16), io=1e5)
    script.train(draw.minutes(20, 40))
    return script


@trace_class(
    "healthy",
    "Rank 0 evaluates on the CPU for 31 to 50 minutes while the other ranks wait in a barrier at 100 %.",
    "nccl#708, torchtune#2093",
    10,
)
def cpu_evaluation_of_rank_0(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    waiting = script.each(script.resting(), *(script.spinning() for _ in range(script.setting.used - 1)))
    lines = draw.one_of((3.0, 60.0, 1e9))
    for _ in range(draw.count(2, 3)):
        script.train(draw.minutes(40, 100))
        script.add(
            draw.minutes(31, 50),
            waiting,
            line_every=lines,
            cpu=script.setting.used + draw.between(0, 6),
            collective=True,
        )
    script.train(draw.minutes(20, 60))
    return script


@trace_class("healthy", "Checkpoints of 5 to 25 minutes to slow storage, in which no GPU works.", "torchtune#2093", 10)
def slow_checkpoint(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    resting = script.everywhere(script.resting())
    for _ in range(draw.count(3, 6)):
        script.train(draw.minutes(25, 80), save_every=1e9)
        script.add(draw.minutes(5, 25), resting, saves=True, cpu=draw.between(0.3, 1.5), io=draw.between(5e7, 8e8))
    script.train(draw.minutes(10, 40))
    return script


@trace_class(
    "healthy",
    "Rank 0 writes a checkpoint for 5 to 25 minutes while the other ranks wait in a collective at 100 %.",
    "FlagScale#1268, torchtune#2093",
    10,
)
def checkpoint_of_rank_0(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    waiting = script.each(script.resting(), *(script.spinning() for _ in range(script.setting.used - 1)))
    for _ in range(draw.count(3, 5)):
        script.train(draw.minutes(30, 80), save_every=1e9)
        script.add(
            draw.minutes(5, 25), waiting, saves=True, cpu=script.setting.used * 1.05, io=draw.between(5e7, 8e8),
            collective=True,
        )  # fmt: skip
    script.train(draw.minutes(20, 40))
    return script


@trace_class("healthy", "An inference server that decodes at 137 to 300 W of 700 W, at 100 %.", "arXiv 2605.11999", 10)
def decode(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (H200, H200, H100), gpus=(1, 2, 4, 8), trusts=("log", "output", "none")))
    script.sends_heartbeats = False
    script.start()
    for _ in range(draw.count(3, 7)):
        memory = draw.between(0.12, 0.85)
        load = script.light(draw.between(0.96, 0.999), depth=0.3, memory=memory)
        load = load._replace(watts=draw.between(137, 300), peak=1.0)
        script.add(draw.hours(0.7, 1.6), load, step_every=draw.between(1, 20), line_every=10)
    return script


@trace_class(
    "healthy",
    "Shards over a slow network: 100 % at very low power, the collectives take most of the time, one step a minute.",
    "LlamaFactory#3520 (ZeRO-3), CuMo#11, s1#125",
    12,
)
def slow_network(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=(*STEPS, *STEPS, "output", "none")))
    script.start()
    load = script.light(1.0, depth=0.2, memory=draw.between(0.01, 0.09))
    load = load._replace(watts=script.watts_of(0.05, 0.22), tensor=draw.between(0.004, 0.03), link=2e9)
    pace = draw.between(40, 110)
    script.train(draw.hours(4, 8), step_every=pace, load=load)
    return script


@trace_class("healthy", "Large steps: one in 15 to 25 minutes, the GPU busy all the time.", "common", 8)
def step_in_20_minutes(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=ANY_TRUST))
    script.start()
    loads = script.everywhere(script.training())
    script.train(draw.hours(5, 8), step_every=draw.minutes(15, 25), load=loads)
    return script


@trace_class(
    "healthy",
    "Accumulates gradients: a step in 5 to 12 minutes, with pauses of some minutes in which data is prepared.",
    "common",
    8,
)
def gradient_accumulation(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    busy, resting = script.everywhere(script.training()), script.everywhere(script.resting())
    end = script.now + draw.hours(4, 7)
    while script.now < end:
        script.add(draw.minutes(3, 8), busy, ends_step=True)
        script.add(draw.minutes(1, 5), resting, cpu=draw.between(1, 8), io=draw.between(1e6, 1e8))
    return script


@trace_class(
    "healthy",
    "Reinforcement learning: simulators run on the CPU for minutes, the GPU works for seconds.",
    "PufferDrive#397",
    10,
)
def simulators(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2)))
    script.start()
    busy, resting = script.everywhere(script.training(0.2)), script.everywhere(script.resting())
    end = script.now + draw.hours(3, 6)
    rollout, update = draw.between(40, 400), draw.between(4, 40)
    cores = draw.between(4, 60)
    while script.now < end:
        script.add(rollout * draw.between(0.7, 1.4), resting, cpu=cores, io=1e4)
        script.add(update * draw.between(0.7, 1.4), busy, ends_step=True, cpu=1.2)
    return script


@trace_class(
    "healthy", "An inference server with a request of some seconds every 10 to 25 minutes.", "job_defense_shield#2", 10
)
def sparse_server(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2), trusts=("log", "output", "none"), samplings=("buffered",)))
    script.sends_heartbeats = False
    script.start(2, 15)
    busy, resting = script.everywhere(script.training(0.3)), script.everywhere(script.resting())
    end = script.now + draw.hours(5, 9)
    cores = draw.one_of((0.05, 0.2, float(script.setting.used)))
    while script.now < end:
        script.add(draw.minutes(10, 25), resting, cpu=cores, io=1e3)
        script.add(draw.between(6, 90), busy, ends_step=True, cpu=1.3)
    return script


@trace_class("healthy", "A job that works on one GPU and keeps another one for later.", "common", 8)
def spare_gpu(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(2, 4)))
    script.start()
    rests = [script.resting(0.5) for _ in range(script.setting.used - 1)]
    script.train(draw.hours(4, 8), load=script.each(script.training(), *rests))
    return script


@trace_class(
    "healthy",
    "Pipeline parallelism with bubbles: a rank waits at 100 % and 43 % of the limit, another one works.",
    "sglang#10489",
    8,
)
def pipeline_bubbles(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (RTX_3090, RTX_3090, RTX_4090, L40S, A100_80), gpus=(2, 4)))
    script.start()
    ranks = [script.spinning(), *(script.training(0.3) for _ in range(script.setting.used - 1))]
    script.train(draw.hours(3, 7), step_every=draw.between(2, 40), load=script.each(*ranks))
    return script


@trace_class(
    "healthy",
    "Trains at 400 W, then evaluates for an hour or two at 140 W and 100 %, with lines but no steps.",
    "s1#125, CuMo#11",
    10,
)
def light_phase(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (A100_40, A100_80, H100, H200, L40S, B200), gpus=(1, 2, 4, 8)))
    script.start()
    train = script.everywhere(script.training(0.6))
    light = script.light(draw.between(0.9, 0.995), depth=0.2, memory=draw.between(0.025, 0.3))
    light = light._replace(watts=script.watts_of(0.06, 0.2), peak=1.0)
    for _ in range(draw.count(1, 2)):
        script.train(draw.hours(1, 2), load=train)
        script.add(draw.hours(0.7, 2), light, line_every=draw.between(5, 60))
    script.train(draw.minutes(30, 90), load=train)
    return script


@trace_class("healthy", "A notebook in which a person runs a cell every 12 to 27 minutes.", "jupyterhub#1498", 10)
def notebook_in_use(draw: Draw) -> Script:
    kind = setting(draw, gpus=(1,), trusts=("none",), samplings=("buffered", "buffered", "means"))
    script = Script(draw, kind)
    resting = script.everywhere(script.resting())
    script.sends_heartbeats = False
    script.start(0.2, 1)
    for _ in range(draw.count(12, 24)):
        script.add(draw.minutes(12, 27), resting, cpu=draw.between(0.0, 0.1), io=1e2)
        script.add(draw.between(5, 240), script.light(draw.between(0.2, 0.95)), cpu=1.0)
    return script


@trace_class(
    "healthy", "A sweep: trials on the GPU, with 10 to 35 minutes of preprocessing on the CPU in between.", "common", 10
)
def sweep(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2)))
    script.start()
    for _ in range(draw.count(5, 9)):
        script.train(draw.minutes(12, 40))
        rest = script.everywhere_bare() if draw.chance(0.5) else script.everywhere(script.resting())
        script.add(draw.minutes(10, 35), rest, line_every=60, cpu=draw.between(0.95, 16), io=draw.between(1e5, 2e8))
    return script


@trace_class("healthy", "Steps that grow from a minute to a quarter of an hour.", "levanter, recovery/detection.py", 8)
def growing_steps(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=STEPS))
    script.start()
    loads = script.everywhere(script.training(0.4))
    length = draw.between(40, 80)
    while length < draw.minutes(12, 18):
        script.add(length, loads, ends_step=True)
        script.add(length, loads, ends_step=True)
        length *= draw.between(1.08, 1.3)
    return script


@trace_class("healthy", "Training that logs only the end of each epoch, every 20 to 40 minutes.", "common", 8)
def epoch_log(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=("log", "output", "call", "events")))
    script.start()
    loads = script.everywhere(script.training())
    epoch = draw.minutes(20, 40)
    for _ in range(draw.count(8, 14)):
        script.add(epoch * draw.between(0.95, 1.05), loads, ends_step=True)
    return script


@trace_class("healthy", "A trainer whose progress bar is redrawn twice a second.", "common", 6)
def progress_bar(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=("log", "output")))
    script.start()
    script.train(draw.hours(3, 7), step_every=draw.between(0.3, 0.6))
    return script


@trace_class("healthy", "A job without any progress that can be seen: output to a terminal, no files.", "common", 10)
def unseen_progress(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=("none",), seen=draw.chance(0.5)))
    script.start()
    load = script.training() if draw.chance(0.6) else script.light(draw.between(0.1, 0.9))
    script.train(draw.hours(4, 8), load=load)
    return script


@trace_class("healthy", "The data loader falls behind for 5 to 20 minutes at 0 %, and recovers.", "pytorch#1223", 10)
def loader_falls_behind(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    for _ in range(draw.count(3, 6)):
        script.train(draw.minutes(20, 70))
        script.add(draw.minutes(5, 20), script.resting(), cpu=draw.between(0.3, 8), io=draw.between(1e5, 2e8))
    script.train(draw.minutes(20, 60))
    return script


@trace_class(
    "healthy",
    "Shared storage stops for 5 to 25 minutes: all ranks wait in a collective at 100 %, then go on.",
    "nccl#708, marin#7344",
    12,
)
def storage_hiccup(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    spinning = script.everywhere(script.spinning())
    loads = script.everywhere(script.training())
    pace = draw.between(0.5, 20)
    for _ in range(draw.count(2, 4)):
        script.train(draw.minutes(30, 120), load=loads, step_every=pace)
        script.add(
            draw.minutes(5, 25), spinning, cpu=script.setting.used * 1.02, io=draw.between(0, 1e4), collective=True
        )
    script.train(draw.minutes(30, 60), load=loads, step_every=pace)
    return script


@trace_class("healthy", "A hot machine: clocks and watts fall to a half for an hour or two.", "common", 8)
def thermal_throttling(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    full = script.training(0.7)
    hot = full._replace(
        watts=max(full.watts * draw.between(0.42, 0.6), script.board.context * 1.1),
        throttling=("hardware thermal",),
        memory=full.memory * 0.5,
        tensor=full.tensor * 0.5,
        dram=full.dram * 0.5,
    )
    pace = draw.between(0.5, 15)
    for _ in range(draw.count(2, 3)):
        script.train(draw.minutes(40, 90), load=full, step_every=pace)
        script.train(draw.minutes(40, 120), load=hot, step_every=pace * 2)
    return script


@trace_class("healthy", "Boards that their owner has capped to a half of the usual power.", "common", 6)
def power_capped(draw: Draw) -> Script:
    kind = setting(draw, DATA_CENTRE)
    board = kind.board
    limit = (board.limit or 300.0) * draw.between(0.5, 0.65)
    script = Script(draw, kind._replace(board=board._replace(limit=limit, busy=(limit * 0.93, limit * 0.99))))
    script.start()
    script.train(draw.hours(4, 7), load=script.training()._replace(throttling=("power cap",)))
    return script


@trace_class("healthy", "Training on a MIG slice of an H100, of which GPM reports the means.", "DCGM#80", 6)
def slice_with_pipes(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (H100_SLICE,), gpus=(1, 1, 2)))
    script.start()
    for _ in range(draw.count(3, 6)):
        script.train(draw.minutes(30, 90))
        script.add(draw.minutes(2, 15), script.resting(), cpu=draw.between(0.8, 4))
    return script


@trace_class(
    "healthy", "Optimizer on the CPU: minutes of CPU work between bursts at full power.", "LlamaFactory#3520", 8
)
def offloaded_optimizer(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 2, 4)))
    script.start()
    busy, rest = script.everywhere(script.training()), script.everywhere(script.resting())
    end = script.now + draw.hours(3, 6)
    on, off = draw.between(15, 120), draw.between(20, 240)
    while script.now < end:
        script.add(on * draw.between(0.8, 1.2), busy, cpu=2.0)
        script.add(off * draw.between(0.8, 1.2), rest, ends_step=True, cpu=draw.between(8, 60))
    return script


@trace_class("healthy", "Training on a desktop whose screen is drawn by the same GPU.", "common", 6)
def desktop_training(draw: Draw) -> Script:
    script = Script(draw, setting(draw, DESKTOPS, gpus=(1,), spare=(0,), listings=("shares", "no shares")))
    script.guests += desktop(draw)
    script.start()
    script.train(draw.hours(3, 6))
    return script


@trace_class(
    "healthy", "A small job beside a large one of another user on the same GPU.", "gpu-reaper skips shared nodes", 8
)
def beside_another_user(draw: Draw) -> Script:
    script = Script(draw, setting(draw, DATA_CENTRE, gpus=(1,), listings=("shares",)))
    script.guests.append(neighbour(draw, script))
    script.start()
    script.train(draw.hours(3, 6), load=script.light(draw.between(0.1, 0.4)))
    return script


@trace_class(
    "healthy", "Training on a node where a health check uses each GPU for a while every hour.", "autopilot#75", 6
)
def health_checked_training(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(1, 4, 8), listings=("shares",)))
    script.guests.append(health_check(draw, script))
    script.start()
    script.train(draw.hours(4, 7))
    return script


@trace_class(
    "healthy", "A rank fails, the launcher restarts all of them from a checkpoint in 3 to 15 minutes.", "NVRx", 8
)
def elastic_restart(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(4, 8), trusts=STEPS))
    script.start()
    loads = script.everywhere(script.training())
    for _ in range(draw.count(2, 3)):
        script.train(draw.hours(0.7, 2), load=loads)
        # The others wait for the rank that is gone until the watchdog of the collective ends them.
        script.add(draw.minutes(2, 10), script.each(script.bare(), *_spinning(script, -1)), cpu=script.setting.used)
        script.add(draw.between(20, 90), script.everywhere_bare(), cpu=draw.between(0.5, 2), io=1e7)
        script.add(draw.minutes(2, 8), script.resting(), line_every=20, cpu=draw.between(1, 8), io=5e8)
    script.train(draw.minutes(40, 90), load=loads)
    return script


@trace_class(
    "healthy", "Training while the driver now and then cannot be read for some seconds.", "nvidia_gpu_exporter#89", 6
)
def training_with_flaky_driver(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(3, 6))
    script.faults += flaky(draw, script)
    return script


@trace_class("healthy", "One node of a job with 64 GPUs, which often waits for nodes that are slower.", "marin#7344", 8)
def waits_for_slower_nodes(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (A100_40, H100, H200, B200, GB200), gpus=(8,), trusts=(*STEPS, "none")))
    script.start()
    busy, waiting = script.everywhere(script.training()), script.everywhere(script.spinning())
    end = script.now + draw.hours(4, 6)
    while script.now < end:
        script.add(draw.minutes(1, 4), busy, step_every=draw.between(5, 30), line_every=30)
        script.add(draw.minutes(0.5, 5), waiting, collective=True)
    return script


@trace_class("healthy", "Loads the weights of a large model for 10 to 28 minutes, then serves.", "vllm#16226", 6)
def server_loads_weights(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(2, 4, 8), trusts=("log", "output", "none")))
    script.sends_heartbeats = False
    script.add(draw.minutes(10, 28), script.resting(2.0), cpu=draw.between(0.5, 8), io=draw.between(5e7, 2e9))
    load = script.light(draw.between(0.3, 0.99), memory=draw.between(0.1, 0.5))
    script.add(draw.hours(3, 6), load, step_every=draw.between(0.5, 20), line_every=10)
    return script


@trace_class(
    "healthy",
    "Training at a low duty, with one nvidia-smi sample every 10 to 60 seconds.",
    "nvmlUtilization_t: the sample period is at most a second",
    8,
)
def sampled_seldom(draw: Draw) -> Script:
    script = Script(draw, setting(draw, samplings=("momentary",), gpus=(1, 2)))
    script.start()
    busy, rest = script.everywhere(script.training()), script.everywhere(script.resting())
    end = script.now + draw.hours(3, 6)
    on, off = draw.between(5, 25), draw.between(5, 35)
    while script.now < end:
        script.add(on * draw.between(0.7, 1.3), busy, ends_step=True)
        script.add(off * draw.between(0.7, 1.3), rest, cpu=draw.between(1, 6))
    return script


@trace_class("healthy", "A machine with 16 to 64 GPUs, all at work.", "common", 4)
def many_gpus(draw: Draw) -> Script:
    kind = setting(draw, (V100_SXM, A100_40, H100), gpus=(16, 32, 64), spare=(0,), samplings=("buffered",), every=15.0)
    script = Script(draw, kind._replace(every=60.0, sampling="means"))
    script.start()
    script.train(draw.hours(2, 3))
    return script


@trace_class(
    "healthy",
    "Rank 0 evaluates on its GPU for 30 to 100 minutes while the other ranks wait in a collective at 100 %.",
    "torchtune#2093, nccl#708",
    8,
)
def gpu_evaluation_of_rank_0(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    own = script.light(draw.between(0.4, 0.98), depth=0.4, memory=draw.between(0.05, 0.4))
    waiting = script.each(own, *_spinning(script, -1))
    loads = script.everywhere(script.training())
    pace = draw.between(0.3, 12)
    for _ in range(draw.count(2, 3)):
        script.train(draw.minutes(40, 100), load=loads, step_every=pace)
        script.add(draw.minutes(30, 100), waiting, line_every=draw.one_of((5.0, 1e9)), collective=True)
    script.train(draw.minutes(20, 60), load=loads, step_every=pace)
    return script


@trace_class(
    "healthy", "All ranks but the first end; that one goes on alone with an evaluation or an export.", "common", 8
)
def other_ranks_end_first(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, listings=("shares", "no shares")))
    script.start()
    script.train(draw.hours(1, 3))
    on_gpu = draw.chance(0.5)
    own = script.light(draw.between(0.6, 0.99), depth=0.3) if on_gpu else script.resting()
    alone = script.each(own, *(script.bare() for _ in range(script.setting.used - 1)))
    length = draw.minutes(40, 120) if on_gpu else draw.minutes(15, 50)
    script.add(length, alone, line_every=draw.one_of((10.0, 300.0)), cpu=draw.between(0.95, 8), io=draw.between(0, 1e7))
    return script


@trace_class(
    "healthy",
    "A search or a simulation in registers: 100 % at high power, memory and tensor pipes still, seldom a line.",
    "hashcat and n-body codes",
    8,
)
def compute_bound(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2, 4), trusts=("log", "output", "none")))
    script.sends_heartbeats = False
    script.start()
    load = script.training(draw.between(0.4, 0.95))
    load = load._replace(
        utilization=1.0, memory=draw.between(0.0, 0.012), tensor=0.0, dram=draw.between(0.0, 0.01), sm=0.95, link=1e4
    )
    loads = script.everywhere(load)
    apart = draw.minutes(5, 50)
    for _ in range(int(draw.hours(4, 7) / apart)):
        script.add(apart * draw.between(0.8, 1.2), loads, ends_step=True, cpu=draw.between(0.02, 1.0), io=10)
    return script


@trace_class(
    "healthy",
    "Shards over a slow network with steps of 5 to 25 minutes, at 100 % and low power.",
    "LlamaFactory#3520",
    8,
)
def slow_network_long_steps(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=(*STEPS, *STEPS, "output", "none")))
    script.start()
    load = script.light(1.0, depth=0.2, memory=draw.between(0.012, 0.06))
    load = load._replace(watts=script.watts_of(0.04, 0.2), tensor=draw.between(0.003, 0.02), link=1e9)
    script.train(draw.hours(5, 8), step_every=draw.minutes(5, 25), load=load, save_every=draw.hours(1, 3))
    return script


@trace_class(
    "healthy", "Evaluates through a web service for 10 to 28 minutes now and then: no GPU, hardly any CPU.", "common", 8
)
def evaluation_by_a_service(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 2, 4)))
    script.start()
    for _ in range(draw.count(4, 7)):
        script.train(draw.minutes(15, 60))
        lines = draw.one_of((5.0, 1e9))
        script.add(draw.minutes(10, 28), script.resting(), line_every=lines, cpu=draw.between(0.01, 0.1), io=2e4)
    return script


@trace_class(
    "healthy",
    "Between two parts of the data, rank 0 fetches and prepares the next one for 40 to 85 minutes; the others spin.",
    "accelerate#314, nccl#708",
    8,
)
def next_part_of_the_data(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    waiting = script.each(script.resting(), *_spinning(script, -1))
    cores = script.setting.used - 1 + draw.between(0.8, 10)
    for _ in range(draw.count(1, 2)):
        script.train(draw.minutes(50, 120))
        lines = draw.one_of((10.0, 120.0, 1e9))
        rate = draw.between(4e6, 2e8)
        script.add(draw.minutes(40, 85), waiting, line_every=lines, cpu=cores, io=rate, collective=True)
    script.train(draw.minutes(30, 90))
    return script


@trace_class(
    "healthy",
    "A server whose ranks wait inside a collective at 100 %, with a request every 10 to 25 minutes.",
    "GLM-130B#32",
    8,
)
def sparse_server_in_a_collective(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (V100_SXM, A100_40, A100_80, H100), gpus=SEVERAL, trusts=("log", "output")))
    script.sends_heartbeats = False
    script.start(3, 12)
    busy, waiting = script.everywhere(script.training(0.3)), script.everywhere(script.spinning())
    end = script.now + draw.hours(4, 8)
    while script.now < end:
        script.add(draw.between(5, 90), busy, ends_step=True)
        script.add(draw.minutes(10, 25), waiting, cpu=script.setting.used * 1.0, io=1e2)
    return script


@trace_class(
    "healthy",
    "Waits for the other nodes of its job for 20 to 100 minutes before it begins.",
    "torchelastic rendezvous",
    6,
)
def waits_for_nodes(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(4, 8)))
    waiting = script.everywhere_bare() if draw.chance(0.5) else script.everywhere(script.resting(0.5))
    lines = draw.one_of((30.0, 1e9))
    script.add(draw.minutes(20, 100), waiting, line_every=lines, cpu=draw.between(0.01, 0.2), io=draw.between(0, 1e3))
    script.start()
    script.train(draw.hours(2, 4))
    return script


def _spinning(script: Script, more: int = 0) -> list[Load]:
    return [script.spinning() for _ in range(script.setting.used + more)]


# Others on the machine


def desktop(draw: Draw) -> list[Guest]:
    """The programs that draw the screen."""
    screen = Guest("Xorg", "root", 1100 + draw.count(0, 400), (0,), draw.between(0.01, 0.03), draw.between(1, 6), 0.004)
    shell = Guest(
        "gnome-shell", "bob", 2100 + draw.count(0, 400), (0,), draw.between(0.005, 0.02), 1.0, 0.002, 0.2,
        draw.between(20, 90), draw.between(5, 19),
    )  # fmt: skip
    return [screen, shell]


def neighbour(draw: Draw, script: Script) -> Guest:
    """Another user's training on the first GPU."""
    more = sum(script.board.busy) / 2 - script.board.context
    return Guest(
        "python3", "carol", 500_000 + draw.count(0, 90_000), (0,), draw.between(0.6, 0.97), more * 0.6, 0.3,
        script.board.memory * 0.2,
    )  # fmt: skip


def health_check(draw: Draw, script: Script, low: float = 10 * MINUTE, high: float = HOUR) -> Guest:
    """A tool of the cluster that uses every GPU for some seconds up to some minutes."""
    more = (sum(script.board.busy) / 2 - script.board.context) * draw.between(0.1, 0.6)
    period = draw.between(low, high)
    return Guest(
        draw.one_of(("dcgmi", "nvbandwidth", "gpu-burn")), "root", 700_000 + draw.count(0, 90_000),
        tuple(range(script.setting.gpus)), draw.between(0.3, 1.0), more, draw.between(0.05, 0.5), 0.6,
        period, draw.between(10, 180), draw.between(0, period), resident=False,
    )  # fmt: skip


def flaky(draw: Draw, script: Script, longest: float = 55.0) -> list[Fault]:
    """Looks that fail, for up to a minute in a row."""
    found = []
    at = draw.minutes(2, 15)
    while at < script.now:
        reason = draw.one_of(("the driver did not answer within 5s", "nvidia-smi failed with code 255"))
        found.append(Fault(at, at + draw.between(5, longest), "look", reason))
        at += draw.minutes(2, 16)
    return found
