"""nginx as ingress-nginx configures it, with the article's annotations."""

import contextlib

from places import free_port
from processes import get, program, start, stop, until

CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;

    # The annotations of the article's Ingress; connect, send and read-timeout in each server below.
    client_max_body_size 100m;
    client_body_buffer_size 10m;
    proxy_http_version 1.1;

    # What ingress-nginx does unless told otherwise.
    proxy_buffering off;
    proxy_request_buffering on;
    proxy_next_upstream {next_upstream};
    proxy_set_header Host $host;
    proxy_set_header Connection "";
    proxy_set_header X-Request-ID $request_id;
    gzip on;
    gzip_types application/json text/plain;
    gzip_proxied any;
    add_header X-Backend $upstream_addr always;

    upstream octavo {{
        {servers}
        keepalive 320;
    }}
    server {{
        listen 127.0.0.1:{port};
        proxy_connect_timeout 300s;
        proxy_send_timeout 300s;
        proxy_read_timeout 300s;
        location = /nginx {{ return 200 "here"; }}
        location / {{ proxy_pass {scheme}://octavo; {tls} }}
    }}
    # The same, impatient: what a read timeout does is seen without waiting five minutes.
    server {{
        listen 127.0.0.1:{impatient_port};
        proxy_read_timeout 1500ms;
        location / {{ proxy_pass {scheme}://octavo; {tls} }}
    }}
}}
"""


# What ingress-nginx makes of its annotations backend-protocol and proxy-ssl-*, as the chart's value podTls sets them.
TLS = "proxy_ssl_verify on; proxy_ssl_trusted_certificate {authority}; proxy_ssl_name {name}; proxy_ssl_server_name on;"


class Nginx:
    """A running nginx, whose servers can be changed."""

    def __init__(self, folder, next_upstream, tls):
        self.folder = folder
        self.next_upstream = next_upstream
        self.tls = tls
        self.port = free_port()
        self.impatient_port = free_port()
        self.process = None

    def configure(self, ports):
        """Sends requests to these ports from now on; what runs elsewhere goes on."""
        servers = " ".join(f"server 127.0.0.1:{port} max_fails=0;" for port in ports)
        text = CONFIGURATION.format(
            folder=self.folder,
            servers=servers or "server 127.0.0.1:1 down;",
            port=self.port,
            impatient_port=self.impatient_port,
            next_upstream=self.next_upstream,
            scheme="https" if self.tls else "http",
            tls=TLS.format(**self.tls) if self.tls else "",
        )
        (self.folder / "nginx.conf").write_text(text)
        if self.process:
            self.command("-s", "reload").wait()

    def command(self, *arguments):
        call = [program("nginx"), "-p", self.folder, "-c", self.folder / "nginx.conf", *arguments]
        return start(call, self.folder / "nginx.log")


@contextlib.contextmanager
def proxying(folder, ports, *, next_upstream="error timeout", tls=None):
    """nginx in front of these ports, inside the block. With `tls` it speaks TLS to them, and checks: a file with the
    `authority` and the `name` that the certificate must have."""
    folder.mkdir()
    nginx = Nginx(folder, next_upstream, tls)
    nginx.configure(ports)
    assert nginx.command("-t").wait() == 0, (folder / "nginx.log").read_text()
    nginx.process = nginx.command()
    try:
        until("nginx answers", lambda: get(f"http://127.0.0.1:{nginx.port}/nginx")[0] == 200)
        yield nginx
    finally:
        stop(nginx.process)
