# SPDX-License-Identifier: Apache-2.0
"""Prints the calls that MAX makes of a round trip of two GPUs.

    python -m tests.config.launched together|split FOLDER

No GPU need be there. The folder keeps what MAX wrote.
"""

import os
import sys
from pathlib import Path

import max.driver as driver

driver.set_virtual_device_api("cuda")
driver.set_virtual_device_target_arch("sm_90a")
driver.set_virtual_device_count(2)

from max.driver import CPU, Accelerator  # noqa: E402
from max.engine import InferenceSession  # noqa: E402

from tests.config.test_launch_order import FORMS, TWO  # noqa: E402
from tests.harness import building  # noqa: E402


def main() -> None:
    form, folder = sys.argv[1:]
    session = InferenceSession(devices=[CPU(), Accelerator(0), Accelerator(1)])
    case = TWO["by_rank"]
    with building(form, case, case.config(target="gpu")) as (manager, ranks, graph):
        built = FORMS[form](manager, ranks)
        graph.output(*(value for of_rank in built for value in of_rank))
    InferenceSession.debug.ir_output_dir = folder
    InferenceSession.debug.pre_jit = True
    try:
        session.load(graph)
    except Exception as error:  # it stops before it makes machine code
        assert type(error).__name__ == "CompilationStopped", error
    (path,) = Path(folder).glob("*.mgp.mlir")
    with path.open() as text:
        for line in text:
            if "mogg.compiled.call" in line and "@__primitive" not in line:
                print(line.split(" fusionInfo")[0])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
