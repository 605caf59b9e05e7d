# SPDX-License-Identifier: Apache-2.0
"""Puts a GPU launch's failure record into words: `initializer.py` runs it.

Arguments: rank, time-out in ms, the words of the record. Prints the error.
"""
from max_ep.protocol.counters import N_FAILURE_WORDS
from max_ep.protocol.failures import GRAPH, raise_failure
from std.sys import argv


def main() raises:
    """Prints the text."""
    var args = argv()
    var record = Array[Int32, N_FAILURE_WORDS](fill=0)
    for i in range(N_FAILURE_WORDS):
        record[i] = Int32(Int(args[3 + i]))
    try:
        raise_failure(record, Int(args[1]), Int(args[2]), GRAPH)
    except error:
        print(error)
