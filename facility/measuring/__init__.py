"""What the devices and links of an allocation can do, measured with the model that will be trained."""
