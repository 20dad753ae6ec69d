"""Whether a grammar can be served, found out in a process that may die of it.

The library bounds most of what a grammar costs, but not all: a schema of a few hundred bytes can ask for minutes of
a core or for all memory (a large `multipleOf`, patterns under one `allOf`). A worker that met one would stand still
with all its streams, and so would the next that its request is given to. So a door lets a process of its own build
every grammar that it has not seen, as a worker would, up to the first token. That process has a second of CPU time
for each and ends itself above it (SIGPROF's default action, which needs no interpreter), or when memory is short.

    check(grammar) ──► line of JSON ──► compile, first mask ──► line of JSON: the complaint, or none
                                        └── no line: it died of this grammar, which is refused; the next gets another
"""

import contextlib
import hashlib
import json
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence

import psutil

from serving.grammar import MAX_GRAMMAR_CHARACTERS, GrammarCompiler, GrammarError, json_grammar

_MAX_CPU_S = 1.0
_MAX_MEMORY_BYTES = 1 << 30
"""Above what the process has when it is ready."""
_KEPT_VERDICTS = 1024
_TOO_COSTLY = "it takes too long or too much memory to compile; use simpler patterns and smaller numbers"


class GrammarChecker:
    """Checks the grammars of one door; may be called from any thread, and blocks it.

    Its process is started for the first grammar; `close` ends it. Left alone it ends with whoever holds the pipe.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Args: see `GrammarCompiler`."""
        self._settings = json.dumps([tokenizer_json, vocab_size, list(eos_token_ids)])
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> None:
        """Raise GrammarError unless a worker can draw by this grammar."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            msg = f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            raise GrammarError(msg)
        key = _key(grammar)
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._ask(grammar)
            self._verdicts.move_to_end(key)
            complaint = self._verdicts[key]
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        if complaint:
            raise GrammarError(complaint)

    def knows(self, grammar: str) -> bool:
        """Whether `check` would answer at once."""
        return len(grammar) > MAX_GRAMMAR_CHARACTERS or _key(grammar) in self._verdicts

    def close(self) -> None:
        """End the process; may be called twice. Whoever waits for it is told that it died."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, grammar: str) -> str:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer:
            return str(json.loads(answer))
        self._process = None
        _end(process)
        return _TOO_COSTLY

    def _start(self) -> subprocess.Popen[str]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._settings + "\n")
            process.stdin.flush()
        if not process.stdout.readline():
            self._process = None
            _end(process)
            msg = f"the process that checks grammars does not start: it ended with {process.returncode}"
            raise RuntimeError(msg)
        return process


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it and close its pipes; may be called twice."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


def main() -> None:
    """The process: settings, then one grammar per line, until its pipe is closed."""
    tokenizer_json, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    compiler = GrammarCompiler(tokenizer_json, vocab_size, eos_token_ids)
    compiler.start(json_grammar({"type": "null"})).allowed()
    limit = psutil.Process().memory_info().vms + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _tell("")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
        complaint = _complaint(compiler, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _tell(complaint)


def _complaint(compiler: GrammarCompiler, grammar: str) -> str:
    try:
        compiler.check(grammar)
        compiler.start(grammar).allowed()
    except GrammarError as error:
        return str(error)
    return ""


def _tell(complaint: str) -> None:
    sys.stdout.write(json.dumps(complaint) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
