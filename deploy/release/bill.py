"""The bill of materials of the binary: a CycloneDX SBOM, and the licences of the code that is linked.

    python deploy/release/bill.py --target x86_64-unknown-linux-gnu --sbom octavo.cdx.json --licenses THIRD-PARTY-LICENSES.txt

Both list the crates that cargo links for that target. Procedural macros, build scripts and tests are left out: none of their
code is in the binary. Files of other projects that are embedded in the binary are read from the table of the folder `vendor` that
they lie in."""

import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import uuid

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model import ExternalReference, ExternalReferenceType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = pathlib.Path(__file__).resolve().parents[2]
LICENSE_FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.I)


def output(*command):
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return run.stdout


class Linked:
    """The packages that cargo links into the binary for a target, by name and version."""

    def __init__(self, target):
        edges = ["--edges", "normal,no-proc-macro", "--prefix", "none", "--no-dedupe", "--format", "{p}"]
        tree = output("cargo", "tree", "--locked", "--package", "octavo", "--target", target, *edges)
        # "name v1.2.3 (path)"
        names = {tuple(line.split()[:2]) for line in tree.splitlines()}
        metadata = json.loads(
            output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
        )
        packages = {package["id"]: package for package in metadata["packages"]}
        self.by_id = {id: p for id, p in packages.items() if (p["name"], f"v{p['version']}") in names}
        self.root = next(p for p in self.by_id.values() if p["name"] == "octavo")
        self.edges = {
            node["id"]: [dependency for dependency in node["dependencies"] if dependency in self.by_id]
            for node in metadata["resolve"]["nodes"]
            if node["id"] in self.by_id
        }

    def packages(self):
        return sorted(self.by_id.values(), key=lambda package: (package["name"], package["version"]))

    def third_party(self):
        return [package for package in self.packages() if package["source"]]


class Vendored:
    """A file of an npm package that is embedded: a row of the table in its folder's README.md."""

    def __init__(self, folder, row):
        code = {column: cell.strip("` ") for column, cell in row.items()}
        self.name, self.version, self.checksum = code["npm package"], code["version"], code["SHA-256"]
        # "MIT, `marked.LICENSE.txt`"
        self.expression, file = re.fullmatch(r"([\w.-]+), `(.+)", code["licence"]).groups()
        self.text = (folder / file).read_text().strip()


def vendored(root=ROOT):
    """Rows of the tables of all folders named `vendor`."""
    found = []
    for page in sorted((root / "crates").rglob("vendor/README.md")):
        lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found += [Vendored(page.parent, dict(zip(header, row))) for row in rows]
    return found


def expression(package):
    """The SPDX expression of a package's licence; cargo once used "/" for "OR"."""
    if not package["license"]:
        sys.exit(f"{package['name']} {package['version']} names no licence")
    return re.sub(r"\s*/\s*", " OR ", package["license"])


# SBOM


def component(package, checksums):
    name, version = package["name"], package["version"]
    outside = bool(package["source"])
    checksum = checksums.get((name, version))
    repository = package["repository"]
    return Component(
        type=ComponentType.LIBRARY if name != "octavo" else ComponentType.APPLICATION,
        name=name,
        version=version,
        bom_ref=f"{name}@{version}",
        description=package["description"],
        licenses=[LicenseFactory().make_from_string(expression(package))],
        purl=PackageURL("cargo", None, name, version) if outside else None,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=checksum)] if checksum else None,
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(repository))] if repository else None,
    )


def vendored_component(file):
    group, _, name = file.name.rpartition("/")
    return Component(
        type=ComponentType.LIBRARY,
        group=group or None,
        name=name,
        version=file.version,
        bom_ref=f"npm:{file.name}@{file.version}",
        licenses=[LicenseFactory().make_from_string(file.expression)],
        purl=PackageURL("npm", group or None, name, file.version),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.checksum)],
    )


def standard_library():
    """Rust's standard library, which is linked without being a crate of the lock file."""
    version = re.match(r"rustc (\S+)", output("rustc", "--version"))[1]
    licence = LicenseFactory().make_from_string("MIT OR Apache-2.0")
    return Component(
        type=ComponentType.LIBRARY,
        name="std",
        version=version,
        bom_ref=f"rust-std@{version}",
        description="Rust's standard library",
        licenses=[licence],
        external_references=[
            ExternalReference(type=ExternalReferenceType.VCS, url=XsUri("https://github.com/rust-lang/rust"))
        ],
    )


def sbom(linked, target, revision, time):
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(p["name"], p["version"]): p["checksum"] for p in lock["package"] if "checksum" in p}
    components = {id: component(package, checksums) for id, package in linked.by_id.items()}
    root = components.pop(linked.root["id"])
    root.properties.add(Property(name="octavo:target", value=target))
    root.properties.add(Property(name="octavo:revision", value=revision))
    std = standard_library()
    # The same source gives the same file.
    serial = uuid.uuid5(uuid.NAMESPACE_OID, f"octavo {linked.root['version']} {revision} {target}")
    embedded = [vendored_component(file) for file in vendored()]
    bom = Bom(components=[*components.values(), std, *embedded], serial_number=serial)
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(time, datetime.UTC)
    components[linked.root["id"]] = root
    for id, dependencies in linked.edges.items():
        bom.register_dependency(components[id], [components[dependency] for dependency in dependencies] + [std])
    bom.register_dependency(root, embedded)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"the SBOM does not match its schema: {error}")
    return text + "\n"


# Licences


def license_files(package):
    folder = pathlib.Path(package["manifest_path"]).parent
    files = sorted(file for file in folder.iterdir() if LICENSE_FILE.match(file.name) and file.is_file())
    named = package["license_file"]
    return files or ([folder / named] if named else [])


def license_texts(package, siblings):
    """The texts in a package, or, if it ships none, those of a package from the same repository. The text of the Apache
    licence is the same everywhere."""
    for candidate in [package, *siblings]:
        if files := license_files(candidate):
            return [file.read_text(errors="replace").strip() for file in files]
    if expression(package) == "Apache-2.0":
        return [(ROOT / "LICENSE").read_text().strip()]
    sys.exit(f"{package['name']} {package['version']} ({package['license']}) ships no licence text")


def licenses(linked):
    users = collections.defaultdict(list)
    texts = {}

    def add(text, user):
        key = " ".join(text.split())
        texts.setdefault(key, text)
        users[key].append(user)

    everything = linked.third_party()
    entries = []
    for package in everything:
        siblings = [p for p in everything if p["repository"] and p["repository"] == package["repository"] and p is not package]
        label = f"{package['name']} {package['version']}"
        entries.append(f"{label}: {expression(package)}")
        for text in license_texts(package, siblings):
            add(text, label)
    for file in vendored():
        entries.append(f"{file.name} {file.version}: {file.expression}")
        add(file.text, f"{file.name} {file.version}")
    parts = ["Octavo contains code of these projects:", "\n".join(entries)]
    parts += [f"{'=' * 80}\n{', '.join(users[key])}\n{'=' * 80}\n\n{texts[key]}" for key in users]
    return "\n\n".join(parts) + "\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", required=True, help="target triple")
    arguments.add_argument("--revision", default="unknown", help="commit that is built")
    arguments.add_argument("--sbom", type=pathlib.Path, required=True, help="file for the CycloneDX SBOM")
    arguments.add_argument("--licenses", type=pathlib.Path, required=True, help="file for the licences")
    given = arguments.parse_args()
    time = int(os.environ.get("SOURCE_DATE_EPOCH", 0))
    linked = Linked(given.target)
    given.sbom.write_text(sbom(linked, given.target, given.revision, time))
    given.licenses.write_text(licenses(linked))


if __name__ == "__main__":
    main()
