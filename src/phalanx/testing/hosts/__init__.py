"""Several hosts on one machine, to test and measure programs that run on more than one."""

from phalanx.testing.hosts.jobs import Job
from phalanx.testing.hosts.network import Host, Hosts
from phalanx.testing.hosts.programs import HostError, Program

__all__ = ["Host", "HostError", "Hosts", "Job", "Program"]
