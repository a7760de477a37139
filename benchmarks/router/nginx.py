"""nginx: no routing by prefix, no metrics, no parsing of streams; near the cost of the kernel alone. And nothing in between."""

from __future__ import annotations

import os
import shutil
import subprocess

from benchmarks.router.machine import Missing
from benchmarks.router.systems import ACCESS_LOG, ORIGIN, Family, Launch, System

# Bodies of every cell fit into a buffer: none is written to the disk.
_CONF = """\
daemon off;
worker_processes {workers};
worker_rlimit_nofile 65536;
pid {folder}/nginx.pid;
error_log stderr warn;
{user}
events {{ worker_connections 16384; }}
http {{
  access_log {access_log};
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  client_max_body_size 0;
  client_body_buffer_size 2m;
  upstream engines {{
{balancing}{servers}
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096{ssl};
    {certificate}
    location / {{
      proxy_pass {scheme}://engines;
      {trust}
      {cors}
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def nginx(least_requests: bool = False) -> System:
    """nginx in turn, or by the fewest connections. Raises Missing."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise Missing("there is no nginx (Debian, Ubuntu: apt-get install nginx)")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr

    def command(launch: Launch) -> list[str]:
        conf = launch.folder / "nginx.conf"
        conf.write_text(nginx_conf(launch, least_requests))
        return [program, "-p", str(launch.folder), "-e", "stderr", "-c", str(conf)]

    policy = "least_conn" if least_requests else "round robin"
    return System("nginx", Family.NGINX, said.rsplit("/", 1)[-1].strip(), command, (policy, policy))


def nginx_conf(launch: Launch, least_requests: bool = False) -> str:
    clients, targets = launch.tls_clients, launch.tls_targets
    certificate = trust = ""
    if clients is not None:
        certificate = f"ssl_certificate {clients.certificate}; ssl_certificate_key {clients.key};"
        certificate += " ssl_protocols TLSv1.2 TLSv1.3;"
    if targets is not None:
        trust = f"proxy_ssl_trusted_certificate {targets.authority}; proxy_ssl_verify on;"
        trust += " proxy_ssl_name 127.0.0.1; proxy_ssl_protocols TLSv1.2 TLSv1.3;"
    return _CONF.format(
        workers=launch.workers,
        folder=launch.folder,
        user="user root;" if os.geteuid() == 0 else "",
        access_log=launch.folder / ACCESS_LOG if launch.has_extras else "off",
        balancing="    least_conn;\n" if least_requests else "",
        port=launch.port,
        ssl="" if clients is None else " ssl",
        certificate=certificate,
        scheme="http" if targets is None else "https",
        trust=trust,
        cors=f"add_header Access-Control-Allow-Origin {ORIGIN} always;" if launch.has_extras else "",
        servers="\n".join(f"    server 127.0.0.1:{port};" for port in launch.targets),
    )


def direct() -> System:
    """Nothing in between: what the load generator and the backend add by themselves."""
    return System("direct", Family.DIRECT, "", lambda launch: [], ("one target", "one target"))
