import signal, time
import pytest
from tests.support import keepers, wait_until
@pytest.mark.parametrize("meets", ["group"]*3)
def test_x(jobs, undisturbed, meets):
    world=2
    t=time.time()
    job = jobs.start(world, meets=meets)
    job.wait_for("step 8")
    print("start", time.time()-t); t=time.time()
    job.send(signal.SIGTERM, 1)
    assert job.statuses() == [143] * world, job.outputs
    print("stop", time.time()-t); t=time.time()
    jobs.check_nothing_left()
    print("left", time.time()-t); t=time.time()
    again = jobs.start(world, meets=meets, pauses=0.0)
    again.hashes()
    print("again", time.time()-t)
    t=time.time()
    while keepers(jobs.folder):
        print(round(time.time()-t,2), [(k.pid, k.cmdline()[-1][k.cmdline()[-1].index('"rank"'):][:10]) for k in keepers(jobs.folder)]); time.sleep(1)
    print("gone", time.time()-t)
    jobs.check_nothing_left()
