"""From the first meeting of the ranks to their end.

* ``first_meeting``: ranks meet before there is a process group.
* ``run_lifecycle``: a run begins on all ranks with the same settings, and is cleaned up at exit.
* ``main_process_calls``: other ranks take part in what only the main process calls.
* ``crash_report``: short tracebacks, one for the first failure.
"""
