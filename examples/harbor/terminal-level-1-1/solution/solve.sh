#!/bin/sh
rm *.bak
