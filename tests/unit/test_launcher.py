"""`ratrain launch` with scripts that know nothing of JAX: what is shown, what is passed on, and how all end."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from ratrain_jax.distributed.failures import explained
from tests.processes import LONG, ROOT, environment

ENDED = re.compile(
    r"process (\d+) (was ended by \w+|ended with exit code \d+); the others were ended"
)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(
            f"import os, signal, sys, time\nme = int(os.environ['RATRAIN_PROCESS_ID'])\n{text}"
        )
        return str(path)

    return write


def command(*arguments):
    return [sys.executable, "-m", "ratrain_jax.cli", "launch", *map(str, arguments)]


def launch(*arguments, code=0, **variables):
    """Runs the launcher to its end; its output and its errors."""
    ended = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout, ended.stderr


def start(*arguments, **options):
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_gone(pids):
    """Once the launcher has ended; the kernel may take a moment."""
    until = time.monotonic() + LONG
    while any(map(is_running, pids)):
        assert time.monotonic() < until, pids


def test_every_line_is_shown_whole_and_in_order_behind_its_process(script):
    path = script(
        "for i in range(2000): print(me, i)\n"
        "print('x' * 1_000_000)\n"
        "sys.stderr.write('error line\\nno end')\n"
        "sys.stdout.write('no end either')\n"
    )
    out, err = launch("-n", 3, path)
    lines = out.splitlines()
    for me in range(3):
        own = [line.removeprefix(f"[{me}] ") for line in lines if line.startswith(f"[{me}]")]
        assert own == [*(f"{me} {i}" for i in range(2000)), "x" * 1_000_000, "no end either"]
    assert len(lines) == 3 * 2002
    wanted = [f"[{me}] {said}" for me in range(3) for said in ("error line", "no end")]
    assert sorted(err.splitlines()) == wanted


def test_ids_are_padded_to_one_width(script):
    out, _ = launch("-n", 11, script("print('here')"))
    assert sorted(out.splitlines()) == sorted(f"[{me:2}] here" for me in range(11))


def test_lines_are_shown_while_the_process_goes_on(script, tmp_path):
    go = tmp_path / "go"
    path = script(f"print('first')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n")
    with start("-n", 1, path) as run:
        assert run.stdout.readline() == "[0] first\n"
        go.touch()
        assert run.wait(LONG) == 0


def test_ids_are_coloured_on_a_terminal_only(script):
    path = script("print('here')")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("-n", 1, path), cwd=ROOT, env=environment(), stdout=theirs
    ) as run:
        assert run.wait(LONG) == 0
        assert re.fullmatch(rb"\x1b\[\d+m\[0\] \x1b\[0mhere\r\n", os.read(ours, 100))
    with subprocess.Popen(
        command("-n", 1, path), cwd=ROOT, env=environment(NO_COLOR=1), stdout=theirs
    ) as run:
        assert run.wait(LONG) == 0
        assert os.read(ours, 100) == b"[0] here\r\n"
    os.close(ours)
    os.close(theirs)


def test_what_processes_are_told(script):
    path = script(
        "names = 'JAX_COORDINATOR_ADDRESS RATRAIN_PROCESSES NPROC XLA_FLAGS'.split()\n"
        "print(*(os.environ.get(name) for name in names), sys.argv[1:], sep=' | ')"
    )
    flags = "--xla_cpu_use_fusion_emitters=false --xla_force_host_platform_device_count=9"
    arguments = ("-n", 2, "--devices-per-process", 3, "--threads", 2, "--", path, "-n", "5")
    out, _ = launch(*arguments, XLA_FLAGS=flags)
    told = [line.partition("] ")[2].split(" | ") for line in sorted(out.splitlines())]
    assert told[0] == told[1]
    address, processes, threads, flags, rest = told[0]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert (processes, threads, rest) == ("2", "2", "['-n', '5']")
    kept = "--xla_cpu_use_fusion_emitters=false"
    assert flags == f"{kept} --xla_force_host_platform_device_count=3"
    out, _ = launch("-n", 1, path)
    assert out.rstrip().endswith("| 1 | None | None | []")


def test_a_module_is_run_as_python_does(tmp_path):
    (tmp_path / "shown.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    out, _ = launch("-n", 1, "--", "-m", "shown", "--lr", "0.1", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert out == "[0] __main__ ['--lr', '0.1']\n"


def test_one_machine_of_several(script):
    path = script(
        "print(os.environ['JAX_COORDINATOR_ADDRESS'], os.environ['RATRAIN_PROCESSES'], me)"
    )
    whole = ("--coordinator", "node1:7890", "--processes", 8)
    out, _ = launch(*whole, "--process-id", 3, "--", path)
    assert out == "[3] node1:7890 8 3\n"
    out, _ = launch(*whole, "--process-id", 6, "-n", 2, "--", path)
    assert sorted(out.splitlines()) == ["[6] node1:7890 8 6", "[7] node1:7890 8 7"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say with -n how many processes to start"),
        (("--processes", 2), "needs --coordinator, --processes and --process-id together"),
        (
            ("--coordinator", "a:1", "--processes", 2, "--process-id", 1, "-n", 2),
            "--process-id 1 with 2 here goes beyond the last of 2 processes, which is 1",
        ),
        (("--coordinator", "a", "-n", 2), "the coordinator is given as 'a'; write host:port"),
        (("-n", 0), "0 is not in the range"),
    ],
)
def test_options_that_contradict_each_other(arguments, said):
    out, err = launch(*arguments, "--", "script.py", code=2)
    assert said in err and out == ""


def test_the_one_that_fails_ends_all_and_is_named_with_its_error(script, tmp_path):
    path = script(
        f"open({str(tmp_path)!r} + f'/pid{{me}}', 'w').write(str(os.getpid()))\n"
        "while not all(os.path.exists(f'{os.path.dirname(__file__)}/pid{i}') for i in range(3)): time.sleep(0.01)\n"
        "if me == 1: raise ValueError('a mistake')\n"
        "time.sleep(600)"
    )
    _, err = launch("-n", 3, path, code=1)
    assert ENDED.search(err).groups() == ("1", "ended with exit code 1")
    summary = err[err.index("ratrain: process 1") :]
    assert "\n  ValueError: a mistake\n" in summary
    assert_gone([int((tmp_path / f"pid{me}").read_text()) for me in range(3)])


def test_one_that_is_killed_is_named_by_its_signal(script):
    path = script("if me == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    _, err = launch("-n", 2, path, code=128 + 9)
    assert ENDED.search(err).groups() == ("0", "was ended by SIGKILL")


def test_its_own_exit_code_is_handed_on(script):
    path = script("sys.exit(7 if me else 0)")
    _, err = launch("-n", 2, path, code=7)
    assert ENDED.search(err).groups() == ("1", "ended with exit code 7")


def test_one_that_does_not_want_to_end_is_killed_with_what_it_started(script, tmp_path):
    path = script(
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if me == 1:\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(tmp_path / 'new')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"    os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pids')!r})\n"
        "    time.sleep(600)\n"
        f"while not os.path.exists({str(tmp_path / 'pids')!r}): time.sleep(0.01)\n"
        "sys.exit(3)"
    )
    launch("-n", 2, "--grace", 1, path, code=3)
    assert_gone(map(int, (tmp_path / "pids").read_text().split()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(script, number):
    path = script(
        "def caught(got, frame):\n"
        "    print('got', got)\n"
        "    time.sleep(0.1)\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(number)}, caught)\n"
        "print('ready')\n"
        "time.sleep(600)"
    )
    with start("-n", 2, path, start_new_session=True) as run:
        said = [run.stdout.readline() for _ in range(2)]
        assert sorted(said) == ["[0] ready\n", "[1] ready\n"]
        os.killpg(run.pid, number)  # as a terminal does
        out, err = run.communicate(timeout=LONG)
    assert sorted(out.splitlines()) == [f"[0] got {int(number)}", f"[1] got {int(number)}"]
    assert run.returncode == 128 + number
    assert err == "ratrain: stopped.\n"


def test_nothing_is_left_when_the_launcher_is_killed(script):
    path = script("print(os.getpid())\ntime.sleep(600)")
    with start("-n", 2, path) as run:
        pids = [int(run.stdout.readline().split()[1]) for _ in range(2)]
        assert all(map(is_running, pids))
        run.kill()
        assert_gone(pids)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            ["F1 client.h] …: INVALID_ARGUMENT: Unexpected task registered with task=2"],
            "the coordinator knows no process 2",
        ),
        (
            ["… ABORTED: 1 unexpectedly tried to connect with a different incarnation. …"],
            "two processes have the id 1, or process 1 was started again",
        ),
        (
            ["… The following tasks are unhealthy (stopped sending heartbeats):", "12", "The …"],
            "process 12 has died or cannot be reached",
        ),
        (["… UNAVAILABLE: Task 2 heartbeat timeout. …"], "process 2 has died"),
        (
            ["… Either the leader task was preempted/died/restarted unexpectedly or …"],
            "process 0, which holds the coordinator, has died",
        ),
        (
            ["The first task at the barrier: 3. Some timed out task names:"],
            "process 3 ended while the others were still at work",
        ),
    ],
)
def test_what_jax_says_of_lost_processes_is_told_in_a_sentence(log, said, script):
    assert said in explained(["something else", *log, "RPC: …"])
    assert explained(["something else"]) is None
    path = script(f"print({chr(10).join(log)!r}, file=sys.stderr)\nos.abort()")
    _, err = launch("-n", 1, path, code=128 + 6)
    assert "process 0 was ended by SIGABRT." in err
    assert f"ratrain: {said}" in err
