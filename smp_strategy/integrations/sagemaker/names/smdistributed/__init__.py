"""SageMaker's names in a process that a script under ``smp run`` starts anew (``spawn``, ``forkserver``).

``smp run`` appends the folder around this one to ``sys.path``, which Python hands on to such processes. The first
import of ``smdistributed`` there gives all names away, as in the process above.
"""

from smp_strategy.integrations.sagemaker.run_script import install_names

__all__: list[str] = []

install_names()
