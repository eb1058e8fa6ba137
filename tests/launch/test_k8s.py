"""The manifests of launch/k8s: they are as the schemas of Kubernetes say, and give the launcher what it needs."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config.places import ROOT
from train.process.signals import STATUS

SCHEMAS = ROOT / "tests/launch/k8s_schemas.json"
"""What the schemas of Kubernetes, JobSet and the training operator say of the keys that manifests use."""
MANIFESTS = {
    f"{path.name}/{document['kind']}": document
    for path in sorted(ROOT.glob("launch/k8s/*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def faults(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Where a manifest is not as the schemas say."""
    types = schema.get("type", [])
    wanted = tuple(TYPES[name] for name in ([types] if isinstance(types, str) else types))
    if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        yield f"{path} is {value!r}, no {types}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path} is {value!r}, none of {schema['enum']}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{path} is {value}, less than {schema['minimum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path} is {value!r}, not like {schema['pattern']}"
    if isinstance(value, dict):
        yield from (f"{path} lacks {name}" for name in schema.get("required", []) if name not in value)
        known = schema.get("properties", {})
        for name, inner in value.items():
            if name not in known and "values" not in schema:
                yield f"{path}.{name} is not known; if Kubernetes knows it, add it to {SCHEMAS.name}"
            else:
                yield from faults(inner, known.get(name) or schema["values"], f"{path}.{name}")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from faults(inner, schema["items"], f"{path}[{index}]")


def schema_of(name: str) -> dict[str, Any]:
    return json.loads(SCHEMAS.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_as_the_schemas_say(name: str) -> None:
    assert list(faults(MANIFESTS[name], schema_of(name), name)) == []


def spoil_key(manifest: dict[str, Any]) -> str:
    manifest["spec"]["failurePolicy"]["maxRestart"] = 1
    return "failurePolicy.maxRestart is not known"


def spoil_type(manifest: dict[str, Any]) -> str:
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "2"
    return "completions is '2', no integer"


def spoil_required(manifest: dict[str, Any]) -> str:
    del manifest["spec"]["replicatedJobs"][0]["name"]
    return r"replicatedJobs\[0\] lacks name"


@pytest.mark.parametrize("spoil", [spoil_key, spoil_type, spoil_required])
def test_a_wrong_manifest_is_seen(spoil: Any) -> None:
    manifest = copy.deepcopy(MANIFESTS["jobset.yaml/JobSet"])
    expected = spoil(manifest)
    (fault,) = faults(manifest, schema_of("jobset.yaml/JobSet"), "jobset")
    assert re.search(expected, fault)


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


PODS = {f"{name} {index}": pod for name, each in MANIFESTS.items() for index, pod in enumerate(pods(each))}


@pytest.mark.parametrize("name", PODS)
def test_every_pod_has_resources_an_image_that_is_built_and_a_volume_that_is_claimed(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    line = subprocess.run(["make", "-n", "image", "DEVICE=cuda"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"--tag {container['image']} ." in line.stdout
    assert f"WORKDIR {container['workingDir']}\n" in (ROOT / "Dockerfile").read_text()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert {"nvidia.com/gpu", "memory"} <= container["resources"]["limits"].keys()
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
    assert MANIFESTS["storage.yaml/PersistentVolumeClaim"]["metadata"]["name"] in claims
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    started = re.findall(r"launch/\w+\.sh", " ".join(container["command"]))
    assert started
    assert all((ROOT / each).stat().st_mode & 0o111 for each in started)
    assert pod["terminationGracePeriodSeconds"] > 30  # which torchrun gives its processes


@pytest.mark.parametrize(
    ("name", "path", "host"),
    [
        ("job.yaml/Job", "spec", "{name}-0.{subdomain}"),
        ("jobset.yaml/JobSet", "spec.replicatedJobs.0.template.spec", "{name}-{job}-0-0.{subdomain}"),
    ],
)
def test_pods_of_an_indexed_job_find_each_other(name: str, path: str, host: str) -> None:
    manifest = MANIFESTS[name]
    job: Any = manifest
    for step in path.split("."):
        job = job[int(step)] if step.isdigit() else job[step]
    (pod,) = pods(job)
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert {"NNODES", "NODE_RANK", "MASTER_ADDR", "RUN_DIR"} <= set(variables)
    assert int(variables["NNODES"]) == job["completions"] == job["parallelism"]
    subdomain = pod.get("subdomain") or manifest["spec"]["network"]["subdomain"]
    inner = manifest["spec"].get("replicatedJobs", [{}])[0].get("name")
    assert variables["MASTER_ADDR"] == host.format(name=manifest["metadata"]["name"], job=inner, subdomain=subdomain)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("Ignore", [STATUS])


def test_the_service_of_the_plain_job_is_its_subdomain() -> None:
    (pod,) = pods(MANIFESTS["job.yaml/Job"])
    assert pod["subdomain"] == MANIFESTS["job.yaml/Service"]["metadata"]["name"]


def test_both_kinds_of_pytorchjob_pods_are_the_same() -> None:
    replicas = MANIFESTS["pytorchjob.yaml/PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert replicas["Master"]["replicas"] == 1


@pytest.fixture
def daily(tmp_path: Path) -> Any:
    """Runs launch/daily.sh where torchrun is played by a script that prints its arguments."""
    for name, text in (("torchrun", ""), ("python3", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(day: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NPROC": "1", "RUN_DIR": str(tmp_path / "runs" / day)}
        line = [str(ROOT / "launch/daily.sh"), "data=shop", "x=1 2"]
        done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return run


def finish(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text("{}")


def test_a_day_goes_on_from_the_newest_finished_one_before_it(daily: Any, tmp_path: Path) -> None:
    first = daily("2026-11-01")
    assert first[-2:] == ["data=shop", "x=1 2"]
    finish(tmp_path / "runs/2026-11-01")
    finish(tmp_path / "runs/2026-11-02")
    (tmp_path / "runs/2026-11-03").mkdir()  # did not finish
    finish(tmp_path / "runs/2026-11-05")  # a later one
    before = tmp_path / "runs/2026-11-02"
    assert daily("2026-11-04")[-5:] == [
        "data=shop",
        "x=1 2",
        f"checkpoint.load='{before}'",
        "checkpoint.load_what=optimizer",
        f"data.vocabulary_of='{before}'",
    ]


def test_a_day_that_has_finished_is_not_trained_again(daily: Any, tmp_path: Path) -> None:
    finish(tmp_path / "runs/2026-11-01")
    assert daily("2026-11-01") == [f"{tmp_path}/runs/2026-11-01 has finished already"]
