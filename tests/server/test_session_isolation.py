"""Scopes, seeds, configurations and errors of one session never touch another: two programs on one server, in turns."""

from tests.subprocesses import finish, running, serving, start

# Each turn begins when the other program has published that its own is over.
TURNS = """
import sys, time, gt, torch
me, other = sys.argv[1], sys.argv[2]
turn = 0
def switch():
    global turn
    turn += 1
    gt.publish(f"{me}{turn}", gt.ones(1))
    gt.subscribe(f"{other}{turn}", timeout=60)
"""
PROGRAM = (
    TURNS
    + """
torch.manual_seed(int(sys.argv[3]))
axis = int(sys.argv[4])
gt.register_config("forward", gt.SignalConfig(shard=gt.ShardConfig(axis=axis)))
switch()
first = gt.rand(4)
switch()
with gt.signal.context("forward"):
    switch()
    x = gt.randn(4, 4)
    switch()
    y = x * 2
specs = [str(x.spec), str(y.spec)]
switch()
failed = gt.arange(3.0)[gt.tensor([7])] if me == "a" else gt.arange(3.0)[gt.tensor([1])]
switch()
gt.rand(2)
try:
    print(failed.tolist())
except gt.OpError:
    print("failed")
switch()
second = gt.rand(4)
try:
    gt.synchronize()
    print("fine")
except gt.OpError:
    print("unread failure")
switch()
torch.manual_seed(int(sys.argv[3]))
same = gt.rand(4)
print(specs, first.tolist() == same.tolist(), gt.zeros(4, 4).spec)
print([round(value, 5) for value in first.tolist() + second.tolist()])
if me == "a":
    gt.subscribe("over", timeout=60)   # the other one does not need this session any more
else:
    gt.publish("over", gt.ones(1))
    while True:                        # until the other one has ended
        try:
            gt.subscribe("a1")
            time.sleep(0.02)
        except gt.PublishError:
            break
"""
)


def run_pair(port, *arguments):
    programs = [start("-c", PROGRAM, *given, GT_SERVER=f"localhost:{port}") for given in arguments]
    with running(*programs):
        found = [finish(program) for program in programs]
    for code, _, err in found:
        assert code == 0, err
    return [out.splitlines() for _, out, _ in found]


def test_two_sessions_in_turns_do_what_they_would_alone():
    with serving(2) as port:
        a, b = run_pair(port, ("a", "b", "1", "0"), ("b", "a", "2", "1"))
        c, d = run_pair(port, ("a", "b", "1", "0"), ("b", "a", "1", "0"))
    assert a[:2] == ["failed", "fine"] and b[:2] == ["[1.0]", "fine"]
    assert a[2].startswith("['w, -', 'w, -'] True") and b[2].startswith("['-, w', '-, w'] True")
    assert a[3] == c[3] == d[3] != b[3]  # numbers depend on the own seed alone
