"""Who may connect, where, and what a link does with bytes."""

import contextlib
import dataclasses
import os
import socket
import ssl
import stat
import sys
import threading
import time

import pytest
from handoffs import handoff

import tiny
from kvplane.errors import ArgumentError, ExtraMissing
from kvplane.testing.certificates import Authority
from kvplane.transfer import LinkLost, LinkTimeout, Listener, connect, memory_links, send
from kvplane.transfer.clock import Clock
from kvplane.transfer.links import Address


@pytest.fixture(scope="module", name="authority")
def authority_of_all(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", name="mine")
def identity_of_the_receiver(authority):
    return authority.identity("receiver")


@pytest.fixture(scope="module", name="stranger")
def identity_of_a_stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("strange"), "other").identity("stranger")


def linked(address, *, identity=None, server=None):
    """Two ends of one connection; a failure in place of an end that has none."""
    with Listener(address, identity=server) as listener:
        found = []

        def accept():
            try:
                found.append(listener.accept(timeout_s=5, handshake_s=1))
            except (LinkLost, LinkTimeout) as error:
                found.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            near = connect(listener.address, identity=identity, timeout_s=5)
        except LinkLost as error:
            near = error
        thread.join(10)
        return near, found[0]


def pair_of(kind, folder, mine, theirs):
    if kind == "memory":
        return memory_links(capacity=4096)
    if kind == "Unix":
        return linked(f"unix:{folder}/socket")
    tls = {"identity": theirs, "server": mine} if kind == "TLS" else {}
    return linked("127.0.0.1:0", **tls)


KINDS = ["memory", "Unix", "TCP", "TLS"]


@pytest.fixture(params=KINDS, name="links")
def links_of_every_kind(request, tmp_path, mine, authority):
    near, far = pair_of(request.param, tmp_path, mine, authority.identity("sender"))
    yield near, far
    near.close()
    far.close()


def read(link, count, clock):
    data = bytearray(count)
    view = memoryview(data)
    while view.nbytes:
        view = view[link.read_into([view[:1], view[1:]] if len(view) > 1 else [view], clock) :]
    return bytes(data)


def test_what_goes_in_at_one_end_comes_out_at_the_other(links):
    near, far = links
    parts = [os.urandom(size) for size in (1, 0, 70_000, 3, 300_000)]
    writer = threading.Thread(target=near.write, args=(parts, Clock(20, 20)))
    writer.start()
    got = read(far, 370_004, Clock(20, 20))
    writer.join()
    far.write([b"back"], Clock(20, 20))

    assert b"".join(parts) == got
    assert b"back" == read(near, 4, Clock(20, 20))


def test_a_wait_ends_when_it_said(links):
    near, _ = links
    begin = time.monotonic()
    with pytest.raises(LinkTimeout, match=r"nothing moved within 0\.1 s"):
        near.read_into([memoryview(bytearray(1))], Clock(5, 0.1))
    with pytest.raises(LinkTimeout, match=r"the handoff was not over within 0\.1 s"):
        near.read_into([memoryview(bytearray(1))], Clock(0.1, 5))

    assert time.monotonic() - begin < 30


def test_a_peer_that_reads_nothing_is_waited_for_no_longer_than_said(links):
    near, _ = links
    clock = Clock(20, 0.2)
    with pytest.raises(LinkTimeout, match=r"nothing moved within 0\.2 s"):
        near.write([bytes(1 << 20)] * 64, clock)


def test_a_peer_that_is_gone_is_lost(links):
    near, far = links
    far.close()
    with pytest.raises(LinkLost):
        near.read_into([memoryview(bytearray(1))], Clock(5, 5))
    with pytest.raises(LinkLost):
        near.write([bytes(1 << 20)] * 64, Clock(5, 5))


def test_a_link_is_closed_at_the_end_of_a_with(links):
    near, far = links
    with near as same:
        buffer = memoryview(bytearray(1))

    assert near is same
    with pytest.raises(LinkLost):
        far.read_into([buffer], Clock(5, 5))


def test_a_link_that_this_side_closed_is_lost(links):
    near, _ = links
    near.close()
    near.close()
    near.finish(linger_s=0.01)
    buffer = memoryview(bytearray(1))
    for use in (
        lambda: near.read_into([buffer], Clock(5, 5)),
        lambda: near.write([b"x"], Clock(5, 5)),
        lambda: near.poll([buffer]),
    ):
        with pytest.raises(LinkLost):
            use()


def test_a_look_takes_what_is_there_and_does_not_wait(links):
    near, far = links
    buffer = bytearray(8)
    with pytest.raises(LinkTimeout):
        near.read_into([memoryview(buffer)], Clock(5, 0.05))
    assert 0 == near.poll([memoryview(buffer)])
    far.write([b"abc"], Clock(5, 5))
    until = time.monotonic() + 5
    count = 0
    while not count and time.monotonic() < until:
        count = near.poll([memoryview(buffer)])

    assert b"abc" == bytes(buffer[:count])
    # a wait after it waits again
    with pytest.raises(LinkTimeout):
        near.read_into([memoryview(buffer)], Clock(5, 0.05))


def test_the_last_word_is_heard_though_bytes_are_still_coming(links):
    near, far = links
    stopped = threading.Event()

    def pour():
        with contextlib.suppress(LinkLost, LinkTimeout):
            while not stopped.is_set():
                near.write([bytes(4096)], Clock(0.5, 0.5))

    thread = threading.Thread(target=pour)
    thread.start()
    time.sleep(0.05)
    far.write([b"enough"], Clock(5, 5))
    closing = threading.Thread(target=far.finish)
    closing.start()

    assert b"enough" == read_while(near, thread, stopped)
    near.close()
    closing.join(5)
    assert not closing.is_alive()


def read_while(near, thread, stopped):
    """Six bytes of a link that another thread writes to, once that thread has stopped."""
    stopped.set()
    thread.join(5)
    return read(near, 6, Clock(5, 5))


def test_a_certificate_of_the_authority_is_let_in(authority, mine):
    near, far = linked("127.0.0.1:0", identity=authority.identity("good"), server=mine)
    store = tiny.store(4, None)
    ends = handoff(tiny.filled(tiny.store(4, None).open([]), 9), store, links=(near, far))

    assert 9 == ends.received.tokens == ends.sent.tokens
    assert near.name.startswith("TLS 127.0.0.1:")
    assert "TLSv1.3" == near._socket.version()
    near.close()
    far.close()


def refused(near, far):
    """That the listener let nobody in, and whoever came got not one byte."""
    assert isinstance(far, LinkLost | LinkTimeout)
    if not isinstance(near, LinkLost):
        session = tiny.filled(tiny.store(4, None).open([]), 9)
        with pytest.raises(LinkLost):
            send(session, near, timeout_s=5)
        near.close()


def test_nobody_without_a_certificate_gets_a_byte(mine):
    with Listener("127.0.0.1:0", identity=mine) as listener:
        host, _, port = listener.address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        plain = socket.create_connection((host, int(port)))
        got = []

        def knock():
            try:
                with context.wrap_socket(plain) as secured:
                    got.append(secured.recv(1))
            except OSError as error:
                got.append(error)

        thread = threading.Thread(target=knock)
        thread.start()
        with pytest.raises(LinkLost):
            listener.accept(timeout_s=5)
        thread.join(5)
        plain.close()

    assert isinstance(got[0], OSError) or b"" == got[0]


def test_nobody_of_another_authority_is_let_in(mine, stranger):
    refused(*linked("127.0.0.1:0", identity=stranger, server=mine))


def test_nobody_whose_certificate_has_expired_is_let_in(authority, mine):
    refused(*linked("127.0.0.1:0", identity=authority.identity("old", days=-1), server=mine))


def test_a_receiver_of_another_authority_or_host_gets_nothing(authority, stranger):
    good = authority.identity("client")
    for server in (stranger, authority.identity("elsewhere", hosts=("elsewhere.example",))):
        near, far = linked("127.0.0.1:0", identity=good, server=server)

        assert isinstance(near, LinkLost)
        assert "certificate verify failed" in str(near)
        assert isinstance(far, LinkLost)


def test_plain_bytes_where_tls_is_due_are_refused(mine):
    refused(*linked("127.0.0.1:0", server=mine))


def test_nothing_older_than_tls_1_3_is_spoken(mine):
    for server in (True, False):
        assert ssl.TLSVersion.TLSv1_3 == mine.context(server=server).minimum_version
        assert ssl.CERT_REQUIRED == mine.context(server=server).verify_mode


def test_whoever_connects_and_says_nothing_holds_a_listener_up_only_so_long(mine):
    with Listener("127.0.0.1:0", identity=mine) as listener:
        host, _, port = listener.address.rpartition(":")
        with socket.create_connection((host, int(port))) as plain:
            begin = time.monotonic()
            with pytest.raises(LinkTimeout, match=r"no TLS handshake within 0\.2 s"):
                listener.accept(timeout_s=5, handshake_s=0.2)
            # a few bytes now and then do not make it longer
            plain.sendall(b"\x16")

    assert time.monotonic() - begin < 30


def test_plain_tcp_stays_on_this_machine_unless_somebody_insists():
    with pytest.raises(ArgumentError, match="rows and ids can be read"):
        connect("192.0.2.1:7700")
    with pytest.raises(ArgumentError, match="insecure=True"):
        Listener("0.0.0.0:0")
    with Listener("0.0.0.0:0", insecure=True) as listener:
        assert listener.address.startswith("0.0.0.0:")


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("127.0.0.1:80", Address(None, "127.0.0.1", 80), True),
        ("localhost:80", Address(None, "localhost", 80), True),
        ("[::1]:80", Address(None, "::1", 80), True),
        ("host.example:7700", Address(None, "host.example", 7700), False),
        ("[2001:db8::1]:7700", Address(None, "2001:db8::1", 7700), False),
        ("unix:/run/kv", Address("/run/kv", "", 0), True),
    ],
)
def test_addresses_are_read(text, address, is_local):
    assert address == Address.parsed(text)
    assert is_local == Address.parsed(text).is_local


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "unix:"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ArgumentError):
        Address.parsed(text)


def test_nobody_listening_is_said():
    with Listener("127.0.0.1:0") as listener:
        address = listener.address
    with pytest.raises(LinkLost, match=address):
        connect(address)


def test_a_port_in_use_is_said():
    with (
        Listener("127.0.0.1:0") as listener,
        pytest.raises(LinkLost, match=r"in use"),
    ):
        Listener(listener.address)


def test_nobody_coming_is_said():
    with Listener("127.0.0.1:0") as listener, pytest.raises(LinkTimeout, match="nobody connected"):
        listener.accept(timeout_s=0.05)


def test_a_unix_socket_is_its_owners_and_goes_with_the_listener(tmp_path):
    path = tmp_path / "socket"
    with Listener(f"unix:{path}"):
        assert 0o600 == stat.S_IMODE(path.stat().st_mode)

    assert not path.exists()


def test_a_unix_socket_has_no_tls(tmp_path, mine):
    with pytest.raises(ArgumentError, match="Unix sockets have no TLS"):
        Listener(f"unix:{tmp_path}/socket", identity=mine)


def test_files_that_are_no_certificates_are_refused(tmp_path, mine):
    for field in ("certificate", "key", "authority"):
        broken = dataclasses.replace(mine, **{field: tmp_path / "nothing"})
        with pytest.raises(ArgumentError, match="PEM files that belong together"):
            connect("127.0.0.1:1", identity=broken)


def test_no_wait_begins_once_the_whole_has_taken_too_long():
    clock = Clock(0.01, 5)
    time.sleep(0.02)
    with pytest.raises(LinkTimeout, match=r"here: the handoff was not over within 0\.01 s"):
        clock.wait_s("here")


@pytest.mark.parametrize("seconds", [0, -1, "1", True, None])
def test_limits_are_above_0(seconds):
    with pytest.raises(ArgumentError):
        Clock(seconds)
    with pytest.raises(ArgumentError):
        Clock(1, seconds)


def test_certificates_without_cryptography_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'kvplane\[dev\]'"):
        Authority(tmp_path)
