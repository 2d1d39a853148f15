"""A hub on this machine: as much of the Hugging Face hub's protocol as huggingface_hub and transformers ask for.

Repositories are folders. Small text comes inside the commit, weights through git-LFS first, as on the real one. Run as
a program it prints its port and serves until it is ended:   python hub_server.py FOLDER
"""

import base64
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    root: ClassVar[Path]
    lfs: ClassVar[dict[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code):
        self.answer({"error": code}, 404, X_Error_Code=code)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def where(self):
        return unquote(urlsplit(self.path).path)

    def allowed(self):
        return self.headers.get("Authorization") == "Bearer hf_test"

    def do_PUT(self):
        content = self.body()
        self.lfs[hashlib.sha256(content).hexdigest()] = content
        self.answer(b"")

    def do_POST(self):
        content = self.body()
        if self.where == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if not self.allowed():
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.where == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            (self.root / name).mkdir(parents=True, exist_ok=True)
            (self.root / name / ".asked.json").write_text(json.dumps(asked))
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", self.where):
            return self.answer(
                {"transfer": "basic", "objects": [self.upload(one) for one in json.loads(content)["objects"]]}
            )
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.where):
            files = json.loads(content)["files"]
            large = (".safetensors", ".png")
            return self.answer(
                {
                    "files": [
                        {
                            "path": file["path"], "shouldIgnore": False,
                            "uploadMode": "lfs" if file["path"].endswith(large) else "regular",
                        }
                        for file in files
                    ]
                }
            )  # fmt: skip
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", self.where):
            self.commit(self.root / found[1], [json.loads(line) for line in content.splitlines()])
            address = f"http://{self.headers['Host']}/{found[1]}/commit/{COMMIT}"
            return self.answer({"success": True, "commitUrl": address, "commitOid": COMMIT, "hookOutput": ""})
        self.missing("EntryNotFound")

    def upload(self, one):
        href = f"http://{self.headers['Host']}/upload/{one['oid']}"
        return {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": href}}}

    def commit(self, folder, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.lfs[value["oid"]]
            else:
                continue
            (folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / value["path"]).write_bytes(content)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if found := re.fullmatch(r"/(?:api/resolve-cache/models/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.where):
            return self.file(self.root / found[1], found[2])
        if self.where == "/api/whoami-v2":
            return self.answer({"name": "me", "type": "user", "orgs": []} if self.allowed() else {}, 200)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", self.where):
            if not (folder := self.root / found[1]).is_dir():
                return self.missing("RepoNotFound")
            files = [{"rfilename": path.name} for path in self.files(folder)]
            return self.answer({"id": found[1], "modelId": found[1], "sha": COMMIT, "siblings": files, "tags": []})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(?:/(.+))?", self.where):
            if found[2]:
                return self.missing("EntryNotFound")
            rows = self.files(self.root / found[1])
            return self.answer(
                [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": COMMIT} for p in rows]
            )
        if self.where == "/":
            return self.answer(b"a hub")
        self.missing("RepoNotFound")

    def files(self, folder):
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))

    def file(self, folder, name):
        if not folder.is_dir():
            return self.missing("RepoNotFound")
        if not (folder / name).is_file():
            return self.missing("EntryNotFound")
        content = (folder / name).read_bytes()
        self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)


def main(root):
    Hub.root = Path(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
