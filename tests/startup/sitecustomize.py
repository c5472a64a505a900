"""Python imports this at its start where `tests.forked_trainers.variables` are in the environment.

`python -m facility.train ...`, `facility.prepare` or `facility.probe` asks the server there for a fork, which runs in
its place, and waits for its end: signals go on to the fork, its exit code comes back, and it dies with this process.
Every other command starts as ever.
"""

import os
import sys

FORKED = ("facility.train", "facility.prepare", "facility.probe")
words = [word for word in sys.orig_argv[1:] if word != "-P"]
if os.environ.get("CROSSFED_TEST_TRAINERS") and words[:1] == ["-m"] and words[1] in FORKED:
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(os.environ["CROSSFED_TEST_TRAINERS"])
    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    ignored = [number for number in passed_on if signal.getsignal(number) == signal.SIG_IGN]
    asked = {
        "module": words[1],
        "arguments": words[2:],
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "ignored": ignored,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    fork = int(server.recv(64))

    def pass_on(number: int, _: object) -> None:
        try:
            os.kill(fork, number)
        except ProcessLookupError:
            pass  # it has just ended: its exit code is on its way

    for number in set(passed_on) - set(ignored):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    ended = int(server.recv(64) or -signal.SIGKILL)
    if ended < 0:
        if -ended in passed_on:
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)
