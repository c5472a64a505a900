"""Manifests signed with the ssh key that a facility has anyway: `ssh-keygen -Y sign` and `-Y verify`.

The signature is beside the manifest as `manifest.json.sig`; it covers the manifest, and the manifest covers every
other file by its sha256. The verifier holds an allowed-signers file (see ssh-keygen(1), ALLOWED SIGNERS), one line a
facility, whose principal is the facility's name:

    alpha namespaces="crossfed" ssh-ed25519 AAAAC3Nz...

Keys rotate by two lines of one principal, of which the old has `valid-before="20260401"`. A key is revoked by a file of
the same name with `.revoked` appended: public keys, one a line, or a KRL (`ssh-keygen -k`).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from facility.exchange.errors import ConfigurationError, ManifestError
from facility.exchange.files.durable import write_bytes
from facility.exchange.messages.manifest import NAME, SIGNATURE, read_manifest
from facility.exchange.messages.strict_json import clean_text

NAMESPACE = "crossfed"
"""Keeps a signature made for CrossFed from being valid for anything else, and the other way round."""
REVOKED = ".revoked"
"""What the name of the revocation file has more than that of the allowed-signers file."""
MOST_BYTES = 64_000
SECONDS = 30
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def sign_manifest(directory: Path, key: Path, *, kind: str, of: tuple[str, int] | None = None) -> None:
    """Sign the manifest of `directory`, which is of this `kind`, with the private key file `key`, or with the agent's
    key for a public one. `of`: its federation and round, where others can write it.

    A facility's directory may lie where its coordinator writes: what is signed is a private copy, and a manifest of
    another kind (keys in place of an update), federation or round is refused. Raises `ManifestError`, and
    `ConfigurationError` when ssh-keygen cannot sign: no such key, or a passphrase and no agent.
    """
    directory = Path(directory)
    with tempfile.TemporaryDirectory(prefix="crossfed-sign-") as scratch:
        copy = Path(scratch) / NAME
        copy.write_bytes((directory / NAME).read_bytes())
        found = read_manifest(copy.parent)
        if found.kind != kind:
            raise ManifestError(f"{directory}/{NAME} is of kind {found.kind!r}, expected {kind!r}: it was exchanged")
        if of is not None and of != (found.federation, found.round):
            raise ManifestError(
                f"{directory}/{NAME} is of round {found.round} of {found.federation!r}, expected round {of[1]} of "
                f"{of[0]!r}: it was exchanged"
            )
        _run(
            ["-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(copy)], b"", f"the manifest cannot be signed with {key}"
        )
        signature = copy.with_name(SIGNATURE).read_bytes()
    write_bytes(directory / SIGNATURE, signature)  # under a name that nobody guesses: a link may lie under any other


def verify_signature(directory: Path, signer: str, allowed_signers: Path) -> str:
    """Returns the fingerprint of the key that signed the manifest as `signer`, by the allowed-signers file.

    Checks the manifest alone; `verify_manifest` checks the files against it. Raises `ManifestError` for any other
    signature and for none, `ConfigurationError` where the allowed-signers file is not there.
    """
    directory, allowed_signers = Path(directory), Path(allowed_signers)
    if not allowed_signers.is_file():
        raise ConfigurationError(
            f"the allowed-signers file {allowed_signers} does not exist; see ssh-keygen(1), ALLOWED SIGNERS"
        )
    signature = directory / SIGNATURE
    if signature.is_symlink() or not signature.is_file():
        raise ManifestError(f"{directory} holds no {SIGNATURE}: {signer!r} has to sign its updates (signing_key)")
    if signature.stat().st_size > MOST_BYTES:
        raise ManifestError(f"{signature} has {signature.stat().st_size} bytes, which is not a signature")
    if not signer or signer.startswith("-") or not signer.isprintable() or "," in signer or " " in signer:
        raise ManifestError(f"{signer!r} cannot be a signer's name")
    command = ["-Y", "verify", "-f", str(allowed_signers), "-I", signer, "-n", NAMESPACE, "-s", str(signature)]
    revoked, content = allowed_signers.with_name(allowed_signers.name + REVOKED), (directory / NAME).read_bytes()
    last: list[str] = []
    if os.path.lexists(revoked):  # a link that leads nowhere revokes all, as any file that cannot be read does
        last = ["-r", str(revoked)]
    try:
        said = _run(command + last, content, "")
    except ConfigurationError as refused:
        error = str(refused)
        with suppress(ConfigurationError):
            if last and _run(command, content, ""):
                error = f"{revoked} revokes the key, or is neither a list of public keys, one a line, nor a KRL"
        raise ManifestError(
            f"{directory}/{NAME} is not signed by {signer!r} as {allowed_signers} has it ({error.strip()}): "
            "altered, or signed with another key, or with one that is revoked or no longer valid"
        ) from None
    found = FINGERPRINT.search(said)
    return found[0] if found else ""


def _run(arguments: list[str], text: bytes, what: str) -> str:
    """What ssh-keygen said. Raises `ConfigurationError`."""
    environment = os.environ | {"LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments],
            input=text,
            capture_output=True,
            env=environment,
            timeout=SECONDS,
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError):  # the latter where a folder of PATH may not be read
        raise ConfigurationError(
            "ssh-keygen is not on the PATH: install OpenSSH 8.2 or newer, or switch signing off"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{what}: ssh-keygen did not answer within {SECONDS} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip("@ \r")]  # the last alone does not say which file is wrong
        raise ConfigurationError(f"{what}: {clean_text('; '.join(said) or 'no reason given', 500)}".removeprefix(": "))
    return done.stdout.decode(errors="replace")
