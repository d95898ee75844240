"""The proxy does to a connection what its methods are named for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.proxy import Direction, Proxy


def until(check: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    """A server that gives back whatever comes."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65_536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[Proxy]:
    with Proxy(echo_port) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with dial(proxy) as made:
        assert echoed(made, b"hello") == b"hello"
        yield made


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def say_hello(proxy: Proxy) -> None:
    with dial(proxy) as client:
        echoed(client, b"hello")


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += client.recv(size - len(data)) or pytest.fail("closed")
    return data


def echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return read(client, len(data))


def silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(10)
    return False


def way(proxy: Proxy, name: str) -> Direction:
    direction: Direction = getattr(proxy, name)
    return direction


both_ways = pytest.mark.parametrize("name", ["to_server", "to_client"])


def test_it_passes_on_and_counts_connections_and_bytes(proxy: Proxy, client: socket.socket) -> None:
    data = bytes(range(256)) * 4_000
    sender = threading.Thread(target=client.sendall, args=[data])
    sender.start()
    assert read(client, len(data)) == data
    sender.join()
    dial(proxy).close()
    until(lambda: proxy.accepted == 2)
    until(lambda: proxy.connections == 1)
    until(lambda: (proxy.to_server.bytes, proxy.to_client.bytes) == (len(data) + 5, len(data) + 5))


def test_it_passes_on_the_end(proxy: Proxy, client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    until(lambda: proxy.connections == 0)


@both_ways
def test_a_delay_holds_one_direction_back_and_keeps_the_order(
    proxy: Proxy, client: socket.socket, name: str
) -> None:
    way(proxy, name).delay(0.3)
    started = time.monotonic()
    client.sendall(b"a")
    assert echoed(client, b"b") == b"a"
    assert read(client, 1) == b"b"
    assert time.monotonic() - started >= 0.3
    way(proxy, name).pass_on()
    assert echoed(client, b"c") == b"c"


@both_ways
def test_a_black_hole_takes_everything_and_gives_it_when_it_is_healed(
    proxy: Proxy, client: socket.socket, name: str
) -> None:
    direction = way(proxy, name)
    before = direction.bytes
    direction.black_hole()
    client.sendall(b"lost?")
    assert silent(client)
    until(lambda: direction.held == 5)
    assert direction.bytes == before
    other = proxy.to_client if name == "to_server" else proxy.to_server
    assert other.bytes == (5 if name == "to_server" else 10)
    with dial(proxy) as second:
        second.sendall(b"new")
        assert silent(second)
        proxy.heal()
        assert read(client, 5) == b"lost?"
        assert read(second, 3) == b"new"


def test_the_end_of_a_connection_stays_in_the_black_hole_too(proxy: Proxy, client: socket.socket) -> None:
    proxy.to_client.black_hole()
    client.shutdown(socket.SHUT_WR)
    assert silent(client)
    proxy.heal()
    assert client.recv(1) == b""


@both_ways
def test_a_throttle_lets_so_many_bytes_a_second_through(proxy: Proxy, client: socket.socket, name: str) -> None:
    way(proxy, name).throttle(20_000)
    started = time.monotonic()
    client.sendall(b"x" * 10_000)
    assert read(client, 10_000) == b"x" * 10_000
    assert time.monotonic() - started > 0.4


def test_a_cut_resets_what_is_open_and_new_connections_work(proxy: Proxy, client: socket.socket) -> None:
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert proxy.connections == 0
    with dial(proxy) as second:
        assert echoed(second, b"x") == b"x"


def test_a_cut_ends_what_is_in_the_black_hole(proxy: Proxy, client: socket.socket) -> None:
    proxy.black_hole()
    client.sendall(b"lost")
    with dial(proxy) as second:
        until(lambda: proxy.connections == 2)
        proxy.cut()
        for connection in (client, second):
            with pytest.raises(ConnectionResetError):
                connection.recv(1)


def test_while_it_refuses_old_connections_go_on_and_new_ones_are_counted_and_closed(
    proxy: Proxy, client: socket.socket
) -> None:
    proxy.refuse()
    for _ in range(3):
        with pytest.raises(ConnectionError):
            say_hello(proxy)
    assert proxy.accepted == 4
    assert echoed(client, b"x") == b"x"
    proxy.heal()
    with dial(proxy) as second:
        assert echoed(second, b"x") == b"x"


def test_without_an_upstream_connections_end() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Proxy(unused.getsockname()[1]) as proxy, pytest.raises(ConnectionResetError):
            say_hello(proxy)
