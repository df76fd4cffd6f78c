"""WanStream version for reports. Equal to `wanstream.__version__`."""

VERSION = "0.1.0"
