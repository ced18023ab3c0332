import copy

from torch import nn

from smp_strategy.model.patching import Patches, subclass_of


class Named:
    name = "of the class"

    def call(self):
        return self.name


def test_attributes_of_any_object_are_set_and_restored():
    owner = Named()
    with Patches() as patches:
        patches.put(owner, "call", lambda: "first")
        patches.put(owner, "call", lambda: "second")
        patches.put(owner, "name", None)
        assert owner.call() == "second"
        assert owner.name is None
    assert vars(owner) == {}
    assert owner.call() == "of the class"


def test_an_attribute_of_the_instance_comes_back_even_if_it_is_none():
    owner = Named()
    owner.name = None
    with Patches() as patches:
        patches.put(owner, "name", "patched")
    assert vars(owner) == {"name": None}


def test_copies_of_a_module_call_their_own_method():
    module = nn.Identity()
    patches = Patches()
    patches.replace(module, lambda value: value + 1)
    copied = copy.deepcopy(module)
    assert module(1) == 2
    assert copied(1) == 1
    patches.give_back()
    assert module(1) == 1


class Loud:
    def call(self):
        return super().call().upper()


def test_the_class_of_a_single_object_looks_like_that_of_others():
    owner = Named()
    owner.__class__ = subclass_of(Named, Loud, name="of the object")
    assert owner.call() == "OF THE OBJECT"
    assert repr(type(owner)) == repr(Named)
    assert Named().call() == "of the class"
