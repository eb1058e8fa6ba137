"""What the schemas of Kubernetes say about the manifests of launch/k8s, cut down to the keys that these use.

    python -m tools.k8s_schemas --kubernetes FOLDER --jobset FILE --pytorchjob FILE

writes tests/launch/k8s_schemas.json, by which a test holds the manifests. Run it when a manifest gets a new key: one
that a schema does not know is an error here. FOLDER holds Kubernetes' API as JSON schemas with `_definitions.json`,
as in the package kubernetes-validate; the files are the custom resource definitions jobset.x-k8s.io_jobsets.yaml of
kubernetes-sigs/jobset and kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator 1.9.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "launch" / "k8s"
SCHEMAS = ROOT / "tests" / "launch" / "k8s_schemas.json"
KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum")
QUANTITY = {"type": ["string", "integer"]}


def documents() -> dict[str, dict[str, Any]]:
    """File and kind -> manifest."""
    return {
        f"{path.name}/{document['kind']}": document
        for path in sorted(MANIFESTS.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    }


def cut(schema: dict[str, Any], values: list[Any], definitions: dict[str, Any], path: str) -> dict[str, Any]:
    """The part of a schema that says something about `values`, which stand at one place of manifests."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if schema.get("x-kubernetes-int-or-string") or "oneOf" in schema:
        return QUANTITY
    kept = {key: schema[key] for key in KEPT if key in schema}
    if isinstance(kept.get("type"), list):  # an entry that is left empty is no help
        (kept["type"],) = (name for name in kept["type"] if name != "null")
    mappings = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        names = dict.fromkeys(name for value in mappings for name in value)
        if unknown := names.keys() - schema["properties"].keys():
            raise ValueError(f"{path} has no key {', '.join(sorted(unknown))}")
        kept["properties"] = {
            name: cut(
                schema["properties"][name], [value[name] for value in mappings if name in value], definitions,
                f"{path}.{name}",
            )
            for name in names
        }  # fmt: skip
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [value for each in mappings for value in each.values()]
        kept["values"] = cut(schema["additionalProperties"], inner, definitions, f"{path}.*")
    if "items" in schema:
        inner = [value for each in values if isinstance(each, list) for value in each]
        kept["items"] = cut(schema["items"], inner, definitions, f"{path}[]")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kubernetes", type=Path, required=True, help="folder of JSON schemas")
    parser.add_argument("--jobset", type=Path, required=True)
    parser.add_argument("--pytorchjob", type=Path, required=True)
    options = parser.parse_args()
    definitions = json.loads((options.kubernetes / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    known = {
        (kind["group"], kind["version"], kind["kind"]): schema
        for schema in definitions.values()
        for kind in schema.get("x-kubernetes-group-version-kind", ())
    }
    for path in (options.jobset, options.pytorchjob):
        resource = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        for version in resource["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
            known[resource["group"], version["name"], resource["names"]["kind"]] = schema
    written = {}
    for name, document in documents().items():
        group, _, version = document["apiVersion"].rpartition("/")
        written[name] = cut(known[group, version, document["kind"]], [document], definitions, name)
    SCHEMAS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
