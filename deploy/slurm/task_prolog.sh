#!/bin/sh
# A TaskProlog for Slurm that switches Rankscope's probe on in every task. In slurm.conf, on all nodes:
#
#   TaskProlog=/etc/slurm/rankscope_task_prolog.sh
#
# Slurm runs it as the user, once for each task, and takes `export NAME=value` lines from its output. A job that sets
# RANKSCOPE_PROBE=0 is left alone. This script never fails: a TaskProlog that fails ends the task.

# The folder of `python -m rankscope.probe.injection`, on every node or on a shared file system.
probe=/opt/rankscope-probe

if [ "${RANKSCOPE_PROBE:-1}" != 0 ] && [ -r "$probe/sitecustomize.py" ]; then
    case ":${PYTHONPATH:-}:" in
    *":$probe:"*) ;;
    *) echo "export PYTHONPATH=$probe${PYTHONPATH:+:$PYTHONPATH}" ;;
    esac
    # Without it, a capture leaves a CUDA process slower for the rest of its life (docs/captures.md).
    [ -n "${TEARDOWN_CUPTI:-}" ] || echo "export TEARDOWN_CUPTI=1"
fi
exit 0
