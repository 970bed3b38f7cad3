#!/bin/sh
mv ocean.txt haven.txt
