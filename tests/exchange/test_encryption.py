"""TLS between processes, and the secret and the fingerprint that tasks have in common."""

import shutil
import subprocess

import pytest
from services import CREDENTIAL, TIMEOUT, Twice, connected, serving, twice

from keras_het.exchange import wire
from keras_het.exchange.client import Client
from keras_het.exchange.secret import model_fingerprint, read_secret

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the program openssl")


def openssl(folder, *arguments):
    command = [OPENSSL, *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("own", "other"):
        openssl(
            folder, "req", "-x509", *new_key, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem",
            "-subj", f"/CN={name} authority", "-days", 2,
        )  # fmt: skip
        openssl(
            folder, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr",
            "-subj", "/CN=a machine",
        )  # fmt: skip
        openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem",
            "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", 2,
            "-extfile", "names",
        )  # fmt: skip
    return folder


@pytest.fixture
def use(monkeypatch, certificates):
    def use(name=None, authority=None):
        paths = {wire.CERTIFICATE: f"{name}.pem", wire.KEY: f"{name}.key"}
        paths[wire.AUTHORITY] = f"{authority}-ca.pem"
        for variable, path in paths.items():
            if "None" in path:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, str(certificates / path))

    return use


@needs_openssl
def test_both_sides_show_a_certificate_of_the_authority(use):
    use("own", authority="own")
    with serving(Twice().handle) as server:
        with connected(server) as client:
            assert twice(client, [1.0]) == [2.0]
        # of another authority, and none at all: neither side speaks to them
        for stranger in [("other", "own"), ("other", "other"), (None, None)]:
            use(*stranger)
            client = Client(server.address, "twice", CREDENTIAL)
            assert not client.is_there(1.0)
            with pytest.raises((ConnectionError, TimeoutError)):
                client.connect(0.5)
            client.close()
        use("own", authority="own")
        with connected(server) as client:
            assert twice(client, [1.0]) == [2.0]
            with pytest.raises(PermissionError):  # TLS does not stand in for the secret
                Client(server.address, "twice", b"another").connect(TIMEOUT)
    use("other", authority="other")
    with serving(Twice().handle) as server:  # a server of another authority is refused, too
        use("own", authority="own")
        with pytest.raises((ConnectionError, TimeoutError)):
            Client(server.address, "twice", CREDENTIAL).connect(0.5)


def test_paths_that_do_not_go_together(tmp_path):
    name = str(tmp_path / "none.pem")
    for given in ({wire.CERTIFICATE: name}, {wire.AUTHORITY: name}):
        with pytest.raises(
            ValueError, match=f"certificate and of its key. Received: {next(iter(given))}"
        ):
            wire.read_certificates(given)
    both = {wire.CERTIFICATE: name, wire.KEY: name}
    with pytest.raises(ValueError, match="cannot be read"):
        wire.read_certificates(both)
    assert wire.read_certificates({}) is None


def test_fingerprint_depends_on_everything():
    given = (["a", "b"], [(2, 3), (4,)], ["float32"] * 2, "delta")
    others = [
        (["a", "c"], *given[1:]),
        (given[0], [(3, 2), (4,)], *given[2:]),
        (*given[:2], ["float32", "float16"], given[3]),
        (*given[:3], "async_sgd"),
    ]
    assert len({model_fingerprint(*each) for each in (given, *others)}) == 5


def test_secret(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    file = {"KERAS_HET_SECRET_FILE": str(tmp_path / "secret")}
    text = {"KERAS_HET_SECRET": "0123456789abcdef"}
    assert read_secret(file) == read_secret(text) == b"0123456789abcdef"
    for environ, match in (({}, "neither"), ({**file, **text}, "both")):
        with pytest.raises(ValueError, match=match):
            read_secret(environ)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        read_secret({"KERAS_HET_SECRET": "short"})
