"""Where ranks find each other: keys and values that all of them see."""

from phalanx.stores.base import Store
from phalanx.stores.file import FileStore
from phalanx.stores.hash import HashStore
from phalanx.stores.prefix import PrefixStore
from phalanx.stores.redis import RedisStore
from phalanx.stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "RedisStore", "Store", "TCPStore"]
