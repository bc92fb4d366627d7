"""Files that are none of the kind that is read: each ends at once with exit code 2 and one message.

The commands run in a fork, so that one that reads for ever is ended.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parloom import api, cli
from parloom.errors import InputError
from parloom.input_files import read_input
from tests.forked import forked

END_S = 300.0  # what only a read that does not end would take
GIGABYTE = 1 << 30


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(GIGABYTE)


def to_nowhere(path: Path) -> None:
    path.symlink_to("nothing")


def says(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


DEEP = 10_000
ODD: dict[str, Callable[[Path], None]] = {
    "fifo": fifo,
    "socket": bound_socket,
    "folder": Path.mkdir,
    "loop": loop,
    "endless": endless,
    "long": long,
    "to_nowhere": to_nowhere,
    "latin": says("größe: 1".encode("latin-1")),
    "utf16": says("name: lab".encode("utf-16")),
    "mark_only": says(b"\xef\xbb\xbf"),
    "empty": says(b""),
    "blank": says(b" \n\t\n"),
    "zeros": says(bytes(100_000)),
    "deep_list": says(b"[" * DEEP + b"]" * DEEP),
    "deep_map": says(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "open_list": says(b"[" * DEEP),
    "huge_integer": says(b'{"version": ' + b"9" * 200_000 + b"}"),
    "nan": says(b'{"version": NaN, "model_type": Infinity}'),
    "long_word": says(b"a" * 60_000),
    "long_line": says(b'{"a": "' + b"b" * 60_000 + b'"}'),
    "aliases": says(b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *a]\n" + b"d: *b\n" * 1000),
    "many_keys": says(b"{" + b", ".join(b'"k%d": 1' % i for i in range(1_000)) + b"}"),
    "pickle": says(b"\x80\x04\x95\x0b\x00\x00\x00"),
    "zip": says(b"PK\x03\x04" + bytes(100)),
}
SUFFIXES = {"plan": ".json", "calibration": ".json", "cluster": ".yaml", "config": ".json"}
COMMANDS = {
    "plan": ["simulate", "{}"],
    "calibration": ["plan", "zoo:mlp", "--cluster", "2xcpu", "--calibration", "{}"],
    "cluster": ["cluster", "check", "{}"],
    "config": ["plan", "{}", "--cluster", "2xcpu"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 108 bytes
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUFFIXES)
def test_every_odd_file_ends_with_exit_2_and_one_message(kind: str, folder: Path) -> None:
    names = {odd: f"{odd}{SUFFIXES[kind]}" for odd in ODD}
    for odd, name in names.items():
        ODD[odd](Path(name))

    def read_all() -> int:
        for name in names.values():
            print(f"== {name}", file=sys.stderr, flush=True)
            code = cli.main([word.format(name) for word in COMMANDS[kind]])
            print(f"=> {code}", file=sys.stderr, flush=True)
        return 0

    _, text = forked(read_all, END_S)
    said = text.split("== ")[1:]
    wrong = [text for text in said if not fine(text)]
    assert len(said) == len(names), said[-1]
    assert not wrong, wrong


def fine(text: str) -> bool:
    """One message, which names the file, and exit code 2."""
    name, _, rest = text.partition("\n")
    message, _, code = rest.removeprefix(f"building {name}\n").partition("=> ")
    return (
        code.strip() == "2"
        and message.startswith("error: ")
        and name in message
        and message.count("\n") <= 3
        and len(message) < 1500
        and "Traceback" not in message
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(folder: Path) -> None:
    path = Path("plan.json")
    path.touch(0o000)
    with pytest.raises(InputError, match=r"cannot read the plan plan\.json: Permission denied"):
        read_input(path, "the plan", 10)


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(folder: Path) -> None:
    path = Path("some")
    path.write_bytes(b"x" * 1024)
    assert read_input(path, "the plan", 1024) == b"x" * 1024
    with pytest.raises(InputError, match=r"the plan some: it has more than 0 KiB; make one"):
        read_input(path, "the plan", 1023, "make one")


def test_a_link_to_a_file_is_the_file(folder: Path) -> None:
    Path("some").write_bytes(b"{}")
    Path("link").symlink_to("some")
    assert read_input(Path("link"), "the plan", 10) == b"{}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "zoo:mlp", "--cluster", "2xcpu", "--method", "data_parallel", "--out", "out"],
        ["simulate", "plan", "--trace", "out/trace.json"],
    ],
)
def test_a_disk_that_takes_a_thousand_bytes_gets_none(arguments: list[str], folder: Path) -> None:
    if arguments[1] == "plan":
        api.save(api.plan("zoo:mlp", cluster="2xcpu", method="data_parallel"), "plan")

    def command() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return cli.main(arguments)

    code, said = forked(command, END_S)
    assert code == 2, said
    assert "error: cannot write out" in said
    assert [path for path in Path("out").rglob("*") if path.is_file()] == []
