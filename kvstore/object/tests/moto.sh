#!/bin/sh
# Runs the tests of the object tier against moto (PyPI `moto[server]`), an S3 implementation that is not ours.
# Skips, and says so, where it cannot be installed. Usage: tests/moto.sh [directory for the Python environment]
set -eu
cd "$(dirname "$0")/.."
venv=${1:-$(mktemp -d)/venv}
if [ ! -x "$venv/bin/moto_server" ]; then
    python3 -m venv "$venv" && "$venv/bin/pip" install -q 'moto[server]' || {
        echo "SKIPPED: moto[server] cannot be installed here" >&2
        exit 0
    }
fi
work=$(mktemp -d)
moto=
trap '[ -z "$moto" ] || kill $moto; rm -rf "$work"' EXIT
"$venv/bin/python" - "$work" <<'PYTHON'
# A certificate authority and a certificate of it for 127.0.0.1.
import datetime, ipaddress, sys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
def certificate(name, issuer, key, signer, extension, critical):
    now = datetime.datetime.now(datetime.timezone.utc)
    named = lambda text: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
    builder = x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=2))
    return builder.add_extension(extension, critical).sign(signer, hashes.SHA256()).public_bytes(form.Encoding.PEM)
authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
write = lambda name, text: open(f"{sys.argv[1]}/{name}", "wb").write(text)
write("ca.pem", certificate("ca", "ca", authority, authority, x509.BasicConstraints(True, None), True))
address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
write("server.pem", certificate("server", "ca", server, authority, address, False))
write("server.key", server.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
PYTHON
"$venv/bin/pip" list 2>/dev/null | grep -i '^moto '
for scheme in http https; do
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    tls=
    if [ $scheme = https ]; then
        tls="-s -c $work/server.pem -k $work/server.key"
        export KVSTORE_OBJECT_S3_CA="$work/ca.pem"
    fi
    # shellcheck disable=SC2086
    "$venv/bin/moto_server" -H 127.0.0.1 -p "$port" $tls >"$work/moto.log" 2>&1 &
    moto=$!
    endpoint=$scheme://127.0.0.1:$port
    AWS_ACCESS_KEY_ID=testing AWS_SECRET_ACCESS_KEY=testing "$venv/bin/python" - "$endpoint" "$work/ca.pem" <<'PYTHON'
import sys, time, boto3
for attempt in range(100):
    try:
        client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1", verify=sys.argv[2])
        client.create_bucket(Bucket="kv-bucket")
        break
    except Exception:
        if attempt == 99:
            raise
        time.sleep(0.2)
PYTHON
    echo "moto over $scheme"
    KVSTORE_OBJECT_S3_ENDPOINT=$endpoint cargo test -p kvstore-object --test object external -- --nocapture
    kill $moto
done
moto=
